from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from attnbench.train.optim import LinearSpec, ScheduleSpec, optimizers, schedules, set_rate

STEPS = [1, 2, 99, 100, 101, 400, 4000, 100_000]


def rates(raw: Any, width: int = 512) -> list[float]:
    schedule = schedules.parse(raw)
    return [schedule.rate(step, width) for step in STEPS]


@pytest.mark.parametrize(("warmup", "scale"), [(100, 1.0), (4000, 2.0)])
def test_noam_is_equation_3_of_vaswani_et_al(warmup: int, scale: float):
    expected = [
        scale * (step / warmup if step < warmup else math.sqrt(warmup / step)) / math.sqrt(512 * warmup)
        for step in STEPS
    ]
    assert rates({"kind": "noam", "warmup": warmup, "scale": scale}) == pytest.approx(expected, rel=1e-12)


def test_noam_reads_the_width_of_the_model():
    schedule = schedules.parse({"kind": "noam", "warmup": 10})
    assert schedule.rate(10, 64) == pytest.approx(2 * schedule.rate(10, 256))
    assert schedule.rate(10, 256) == pytest.approx(10**-0.5 / 16)


def test_a_schedule_says_whether_it_reads_the_width():
    class Late(ScheduleSpec):
        kind: str = "late"

        def rate(self, step: int, width: int) -> float:
            return 1.0 if step < 2001 else 1.0 / width

    assert Late().reads_width
    assert [schedules.parse({"kind": kind}).reads_width for kind in ("noam", "constant", "inverse_sqrt")] == [
        True, False, False,
    ]  # fmt: skip


def test_inverse_square_root_climbs_to_its_rate_and_falls_to_its_floor():
    raw = {"kind": "inverse_sqrt", "lr": 1e-3, "warmup": 100, "start": 1e-4, "minimum": 1e-4}
    expected = [1e-4 + 9e-6 * 1, 1e-4 + 9e-6 * 2, 1e-4 + 9e-6 * 99, 1e-3]
    expected += [1e-3 * 10 / math.sqrt(101), 1e-3 / 2, 1e-3 * 10 / math.sqrt(4000), 1e-4]
    assert rates(raw) == pytest.approx(expected, rel=1e-12)


def test_constant_after_a_warm_up():
    assert rates({"kind": "constant", "lr": 0.5}) == [0.5] * len(STEPS)
    assert rates({"kind": "constant", "lr": 0.5, "warmup": 100})[:5] == pytest.approx([0.005, 0.01, 0.495, 0.5, 0.5])


@pytest.mark.parametrize(
    "raw",
    [
        {"kind": "noam", "warmup": 0},
        {"kind": "noam", "scale": 0},
        {"kind": "inverse_sqrt", "lr": 0.0},
        {"kind": "inverse_sqrt", "warmup": 0},
        {"kind": "constant", "lr": -1.0},
        {"kind": "staircase"},
    ],
)
def test_impossible_schedules_are_refused(raw: Any):
    with pytest.raises(ValueError, match=r"greater than|unknown schedule"):
        schedules.parse(raw)


def adam(gradients: list[torch.Tensor], w: torch.Tensor, *, lr: float, decay: float, decoupled: bool) -> torch.Tensor:
    """Algorithm 1 of Kingma & Ba; Algorithm 2 of Loshchilov & Hutter when decoupled."""
    beta1, beta2, eps = 0.8, 0.95, 1e-6
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, gradient in enumerate(gradients, 1):
        g = gradient if decoupled else gradient + decay * w
        if decoupled:
            w = w - lr * decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    return w


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_optimizers_follow_their_papers(kind: str, decay: float):
    torch.manual_seed(0)
    start = torch.randn(5, dtype=torch.float64)
    gradients = [torch.randn(5, dtype=torch.float64) for _ in range(4)]
    raw = {"kind": kind, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": decay}
    weight = nn.Parameter(start.clone())
    optimizer = optimizers.parse(raw).build([weight])
    for gradient in gradients:
        weight.grad = gradient.clone()
        set_rate(optimizer, 0.1)
        optimizer.step()
    expected = adam(gradients, start, lr=0.1, decay=decay, decoupled=kind == "adamw")
    assert torch.allclose(weight.detach(), expected, atol=1e-12, rtol=0)


def test_the_rate_is_set_before_each_step():
    weight = nn.Parameter(torch.ones(2))
    optimizer = optimizers.parse("adam").build([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0]
    set_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]


@pytest.mark.parametrize("betas", [[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.98, 0.99]])
def test_betas_are_two_numbers_below_one(betas: list[float]):
    with pytest.raises(ValidationError, match="two numbers"):
        optimizers.parse({"kind": "adam", "betas": betas})


def test_stairs_keep_the_rate_and_then_halve_it_again_and_again():
    schedule = schedules.parse({"kind": "stairs", "lr": 0.8, "first": 100, "every": 10})
    found = [schedule.rate(step, 512) for step in (1, 100, 101, 110, 111, 121)]
    assert found == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.2, 0.1])
    with pytest.raises(ValidationError, match="every"):
        schedules.parse({"kind": "stairs", "first": 10})


@pytest.mark.parametrize(
    ("kind", "halfway", "late"), [("linear", 0.5, 0.1), ("cosine", 0.5, (1 - math.cos(math.pi / 10)) / 2)]
)
def test_decays_fall_from_their_rate_to_their_floor_and_stay_there(kind: str, halfway: float, late: float):
    schedule = schedules.parse({"kind": kind, "lr": 1.0, "warmup": 100, "steps": 1100})
    found = [schedule.rate(step, 512) for step in (1, 50, 100, 600, 1000, 1100, 5000)]
    assert found == pytest.approx([0.01, 0.5, 1.0, halfway, late, 0.0, 0.0])
    floored = schedules.parse({"kind": kind, "lr": 1.0, "warmup": 100, "steps": 1100, "minimum": 0.2})
    assert [floored.rate(step, 512) for step in (100, 600, 5000)] == pytest.approx([1.0, 0.6, 0.2])
    assert schedules.parse({"kind": kind, "lr": 1.0, "steps": 4}).rate(2, 512) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "steps"),
        ({"steps": 10, "warmup": 10}, "after the warm-up"),
        ({"steps": 10, "minimum": 1.0}, "larger than lr"),
    ],
)
def test_decays_that_do_not_fall_are_refused(kind: str, raw: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        schedules.parse({"kind": kind, **raw})


def test_an_inverse_square_root_does_not_jump_up_to_its_floor():
    assert schedules.parse({"kind": "inverse_sqrt", "lr": 1e-3, "minimum": 1e-3}).rate(10**6, 512) == 1e-3
    with pytest.raises(ValidationError, match=r"minimum \(0.002\) is larger than lr \(0.001\); lower it"):
        schedules.parse({"kind": "inverse_sqrt", "lr": 1e-3, "minimum": 2e-3})


def test_a_warm_up_does_not_fall():
    assert schedules.parse({"kind": "inverse_sqrt", "lr": 1e-3, "start": 1e-3}).rate(1, 512) == 1e-3
    schedules.parse({"kind": "inverse_sqrt", "lr": 1e-9})  # below a start that nobody gave
    with pytest.raises(ValidationError, match=r"the warm-up rises from start 5 to lr 0.001; lower start, or raise lr"):
        schedules.parse({"kind": "inverse_sqrt", "lr": 1e-3, "start": 5.0})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradient_descent(momentum: float):
    weight, buffer = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64)), torch.zeros(2, dtype=torch.float64)
    expected = weight.detach().clone()
    optimizer = optimizers.parse({"kind": "sgd", "momentum": momentum, "weight_decay": 0.1}).build([weight])
    for gradient in (torch.tensor([1.0, 2.0]).double(), torch.tensor([-1.0, 0.5]).double()):
        weight.grad = gradient.clone()
        set_rate(optimizer, 0.25)
        optimizer.step()
        buffer = momentum * buffer + gradient + 0.1 * expected
        expected = expected - 0.25 * buffer
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("kind", schedules.kinds())
def test_no_rate_is_below_0(kind):
    updates = {name: 100 for name, field in schedules.get(kind).model_fields.items() if field.is_required()}
    schedule = schedules.parse({"kind": kind, **updates})
    rates = [schedule.rate(step, 512) for step in (*range(1, 200), 5_000, 10**6)]
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)
    ends = schedule.ends()
    assert max(rates) > 0
    assert ends is None or not any(rate for step, rate in zip(range(1, 200), rates, strict=False) if step >= ends)


@pytest.mark.parametrize("kind", schedules.kinds())
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_rate_is_a_number(kind, value):
    field = "scale" if kind == "noam" else "lr"
    with pytest.raises(ValidationError, match=field):
        schedules.parse({"kind": kind, field: value})


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_says_from_which_update_on_its_rate_is_0(kind: str):
    schedule = schedules.parse({"kind": kind, "steps": 100, "warmup": 10})
    assert schedule.ends() == 100
    assert [schedule.rate(step, 1) > 0 for step in (99, 100, 101)] == [True, False, False]
    assert schedules.parse({"kind": kind, "steps": 100, "minimum": 1e-9}).ends() is None
    assert schedules.parse("inverse_sqrt").ends() is None


class Restarted(LinearSpec):
    kind: Literal["restarted"] = "restarted"

    def rate(self, step: int, width: int) -> float:
        return super().rate(step % self.steps, width)


def test_the_end_of_a_parent_is_not_that_of_another_rate():
    assert Restarted(steps=10).ends() is None
