"""Transforms and attention that are timed are checked against their definition, and what they cost is counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms import rowwise
from attnbench.bench import ops
from attnbench.core import native

CPU = torch.device("cpu")
SHAPE = (2, 3, 5, 9)


@pytest.mark.parametrize(("pattern", "wanted"), [
    ("full", 64.0), ({"kind": "window", "n": 8}, None), ({"kind": "block", "n": 8}, 8.0),
    ({"kind": "global", "n": 8}, None), ({"kind": "bigbird", "n": 8}, None), ({"kind": "random", "n": 8}, 8.0),
])  # fmt: skip
def test_keys_that_a_query_looks_at_are_those_that_get_weight(pattern: Any, wanted: float | None, monkeypatch):
    monkeypatch.setattr(ops, "_CELLS", 1000)  # some queries at a time
    method = ops.Method(pattern=pattern)
    found = ops.looked_at(method, 64, torch.device("cpu"))
    states = torch.zeros(1, 1, 64, ops.HEAD)
    values = torch.eye(64).expand(1, 1, 64, 64)  # a context then is the weights
    weights = ops.Mixer(method._replace(backend="dense"), 1, torch.device("cpu"))(states, states, values)
    assert found == pytest.approx(float((weights > 0).sum()) / 64)
    if wanted is not None:
        assert found == wanted


def test_what_goes_both_ways_gives_each_input_its_gradient():
    seen = []

    def noted(left, right):
        for each in (left, right):
            each.register_hook(lambda slope: seen.append(slope.clone()))
        return left * 2 + right * 3

    left, right, upstream = torch.ones(4), torch.ones(4), torch.arange(4.0)
    ops.both_ways(noted, left, right, upstream=upstream)()
    assert sorted(slope.sum().item() for slope in seen) == [12.0, 18.0]
    assert left.grad is right.grad is None  # nothing is added up from call to call


@pytest.mark.parametrize("make", [
    lambda: ops.transform_cases(((2, 2, 3, 5),), CPU, []),
    lambda: ops.attention_cases(((2, 2, 9, 9),), CPU, torch.float32, n=2),
])  # fmt: skip
def test_cases_do_what_their_groups_say(make, monkeypatch):
    """Forward alone without a graph; both ways by `both_ways`."""
    both = []
    monkeypatch.setattr(ops, "both_ways", lambda function, *given, upstream: both.append(function) or both[-1])
    cases = list(make())
    there, back = ([case for case in cases if case.group.endswith(end)] for end in (", forward", " and backward"))
    assert [case.name for case in there] == [case.name for case in back]
    assert len(there) > 8
    assert len(there) + len(back) == len(cases)
    assert [case.run for case in back] == both
    for case in there:
        assert not case.run().requires_grad


def test_operations_and_bytes_are_counted():
    query, key, value = (torch.randn(1, 2, 16, ops.HEAD, requires_grad=True) for _ in range(3))
    for both in (False, True):
        with FlopCounterMode(display=False) as counter:
            context = (query @ key.mT).softmax(-1) @ value
            if both:
                context.sum().backward()
        assert ops.multiplied(ops.Method(), 2, 16, CPU, both=both) == counter.get_total_flops()
    scores = torch.randn(3, 5)
    assert ops.moved(scores, both=False) == 2 * 15 * 4  # read, written
    assert ops.moved(scores, both=True) == 5 * 15 * 4


def test_a_check_that_has_nothing_to_compare_with_is_none():
    """Torch's own softmax is what the others are timed beside; a check of it with itself could not fail."""
    cases = [*ops.transform_cases(((2, 2, 3, 5),), CPU, []), *ops.attention_cases(((2, 2, 9, 9),), CPU, torch.float32)]
    assert {case.name for case in cases if case.check is None} == {ops.BASELINE}


def test_transforms_are_checked_before_they_are_timed():
    cases = list(ops.transform_cases((SHAPE,), CPU, []))
    names = [case.name for case in cases if case.group.endswith("forward")]
    timed = [*ops.TRANSFORMS, ops.TRAINED]
    assert names == [ops.BASELINE, *timed]
    for case in cases:
        if case.check is not None:
            assert case.check() < 1e-5
        case.run()
    assert [case.name for case in cases if case.check is not None] == timed * 2


def checked(name):
    """Forward, and forward with backward, of a transform."""
    return [case for case in ops.transform_cases((SHAPE,), CPU, []) if case.name == name and case.check is not None]


def test_a_path_that_is_wrong_is_found(monkeypatch):
    wrong = ops.build_transform("softmax")
    monkeypatch.setattr(ops, "build_transform", lambda kind, **given: lambda scores: wrong(scores) * _native())
    (case, _) = checked("softmax")
    assert case.check() > 0.01


def _native():
    """1 in the definition, 2 out of it."""
    return 1 if native._off.get() else 2


def test_attention_of_every_kind_runs_both_ways():
    cases = list(ops.attention_cases(((1, 2, 12, 12),), CPU, torch.float32, n=4))
    assert {case.name for case in cases} >= {"SDPA", "softmax", "window, n = 4", "random, n = 4"}
    for case in cases:
        assert case.check is None or case.check() < 1e-5
        assert case.cost() > 0
        case.run()


def test_the_gradients_of_a_gpus_backends_are_checked():
    pytest.importorskip("triton", reason="Triton is not installed")
    states = [torch.randn(1, 2, 12, ops.HEAD) for _ in range(3)]
    function, plain = (
        ops.Mixer(ops.Method(transform="entmax15", backend="triton"), 2, CPU),
        ops.Mixer(ops.Method(transform="entmax15"), 2, CPU),
    )
    assert ops.slopes_apart(function, plain, states) < 1e-4
    other = ops.Mixer(ops.Method(transform="sparsemax"), 2, CPU)
    assert ops.slopes_apart(function, other, states) > 0.01


def test_what_a_gpu_has_backends_for(monkeypatch):
    methods = {
        "sparsemax": ops.Method(transform="sparsemax"), "sigmoid": ops.Method(transform="sigmoid"),
        "window": ops.Method(pattern={"kind": "window", "n": 3}), "softmax": ops.Method(),
        "random": ops.Method(pattern={"kind": "random", "n": 3}),
    }  # fmt: skip
    assert set(ops.on_a_gpu(methods, CPU)) == set(methods)  # where no kernels are compiled
    monkeypatch.setattr(ops, "compiles", lambda device: True)
    found = ops.on_a_gpu(methods, CPU)
    added = {"sparsemax (triton)", "window (flex)", "softmax (triton)", "softmax (flex)"}
    assert set(found) == set(methods) | added
    assert found["window (flex)"] == methods["window"]._replace(backend="flex")
    assert found["window"] == methods["window"]._replace(backend="dense")


@pytest.mark.parametrize("name", ["sparsemax", "sigmoid"])
def test_gradients_are_checked(name, monkeypatch):
    monkeypatch.setattr(rowwise, "vjp", lambda grad, weights, fused, **given: (torch.zeros_like(weights), None))
    forward, both = checked(name)
    assert forward.check() < 1e-5
    if rowwise.serves(torch.ones(1)):
        assert both.check() > 0.01


def test_mixing_equals_sdpa():
    given = [torch.randn(2, 3, 7, ops.HEAD) for _ in range(3)]
    found = ops.Mixer(ops.Method(), 3, CPU)(*given)
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(*given), rtol=1e-5, atol=1e-5)


def test_a_gradient_for_what_a_mechanism_learns_that_is_wrong_is_found():
    class Halved(torch.autograd.Function):
        """Its gradient is."""

        @staticmethod
        def forward(ctx, raw):
            return raw.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    learned = build_transform("entmax", alpha="learned", heads=3)

    class Wrong(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = learned

        def forward(self, scores):
            raw = self.inner.raw if native.is_off_here() else Halved.apply(self.inner.raw)
            return torch.func.functional_call(self.inner, {"raw": raw}, (scores,))

    scores, upstream = torch.randn(SHAPE), torch.randn(SHAPE)
    assert ops.gradient_off(learned, scores, upstream) < 1e-4
    assert ops.gradient_off(Wrong(), scores, upstream) == pytest.approx(0.5, abs=1e-3)


def test_a_gradient_that_is_no_number_is_found_wherever_it_stands():
    plain = ops.Mixer(ops.Method(), 2, CPU)
    given = [torch.randn(1, 2, 6, ops.HEAD) for _ in range(3)]
    wrong = lambda query, key, value: plain(query, key, value) + (value - value.detach()) * math.nan  # noqa: E731
    assert ops.slopes_apart(plain, plain, given) < 1e-5
    assert math.isnan(ops.slopes_apart(wrong, plain, given))
