"""Rounded batches have the same loss. What is played is tested on a GPU (conformance/test_gpu.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import model_cases as laws
import pytest
import torch

from attnbench.attention.backends import chunked
from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms import _bounded
from attnbench.core import waiting
from attnbench.core.errors import AttnbenchError
from attnbench.core.kernels import installed
from attnbench.core.tree import map_batch
from attnbench.data.base import BOS, EOS, PAD, Batch
from attnbench.tasks import pairs
from attnbench.tasks.base import Loss, tasks
from attnbench.train import loop
from attnbench.train import recorded as module
from attnbench.train.recorded import Recorded, accumulator, records
from attnbench.train.runtime import Runtime
from attnbench.train.step import accumulate, gradients

CPU = Runtime(torch.device("cpu"))


def a_batch() -> Batch:
    """Pairs of 9 to 1 tokens, as many as are rounded up."""
    draw = torch.Generator().manual_seed(0)

    def side(longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(1, longest + 1, (33,), generator=draw)
        lengths[0] = longest
        place = torch.arange(longest)
        words = torch.randint(EOS + 1, laws.VOCABULARY, (33, longest), generator=draw)
        words[place == lengths[:, None] - 1] = EOS
        return words.masked_fill_(place >= lengths[:, None], PAD), place < lengths[:, None]

    source, source_valid = side(5)
    out, valid = side(9)
    shifted = torch.cat([torch.full((33, 1), BOS), out[:, :-1]], 1).masked_fill(~valid, PAD)
    return Batch(source, source_valid, shifted, out, valid, torch.arange(33))


@laws.EACH
def test_padding_that_cannot_be_left_out_adds_nothing(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    task: Any = tasks.parse({"kind": "copying", "dataset": "copy"}).bind()
    model, batch = laws.build(raw).eval(), a_batch()
    batch.target_valid[3], batch.source_valid[3] = False, False  # a row that was added
    found = []
    for way in (pairs._without_padding, lambda batch: None):
        monkeypatch.setattr(pairs, "_without_padding", way)
        model.zero_grad()
        totals = gradients(task, model, batch, task.count(batch), 0.1, CPU)
        found.append([totals, *(each.grad.clone() for each in model.parameters() if each.grad is not None)])
    for mine, theirs in zip(*found, strict=True):
        laws.close(mine, theirs, 1e-9)


@laws.EACH
def test_more_padding_leaves_loss_and_gradients_as_they_are(raw: dict[str, Any]):
    task: Any = tasks.parse({"kind": "copying", "dataset": "copy"}).bind()
    model, batch = laws.build(raw).eval(), a_batch()
    more = task.rounded(model, batch)
    assert more.source.shape == (34, 5)
    assert more.target_in.shape == (34, 9)
    more = map_batch(lambda tensor: torch.nn.functional.pad(tensor, (0, 3)) if tensor.dim() == 2 else tensor, more)
    found = []
    for each in (batch, more):
        model.zero_grad()
        totals = gradients(task, model, each, task.count(each), 0.1, CPU)
        found.append([totals, *(each.grad.clone() for each in model.parameters() if each.grad is not None)])
    for mine, theirs in zip(*found, strict=True):
        laws.close(mine, theirs, 1e-9)


def test_on_a_processor_nothing_is_recorded(toys: Any):
    task, model = toys.Task(), toys.model()  # which round no batch
    batches = [toys.rows(seed, 0, 0, count=3) for seed in (1, 2)]
    totals, tokens = accumulator(task, model, 0.5, CPU)(batches)
    assert tokens == sum(task.count(batch) for batch in batches)
    assert bool(totals.isfinite().all())


def test_who_records_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ATTNBENCH_GRAPHS", raising=False)
    gpu = Runtime(torch.device("cuda"))
    assert (records(CPU), records(gpu)) == (False, True)
    monkeypatch.setenv("ATTNBENCH_GRAPHS", "0")
    assert not records(gpu)


class StandIn:
    """Plays a record by computing it again. waits, fails: what is said of batches that are watched, and of records, in
    turn."""

    def __init__(self, waits: Iterable[bool] = (), fails: Iterable[Exception | None] = ()) -> None:
        self._waits, self._fails = iter(waits), iter(fails)
        self.recorded, self.played = 0, 0

    def waits(self, run: Callable[[], object], *, watched: bool) -> bool:
        run()  # to some place at least
        return watched and next(self._waits, False)

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        fault = next(self._fails, None)
        if fault is not None:
            raise fault
        self.recorded += 1
        totals = torch.full((2,), torch.nan)

        def play() -> None:
            self.played += 1
            totals.copy_(run())

        return play, totals


class Branching(torch.nn.Module):
    """Looks at its second layer for batches of four and more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = (torch.nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.second(x) if len(x) >= 4 else 0)


class Regression(NamedTuple):
    """A task on batches as they are."""

    fault: Callable[[Any], None] = lambda batch: None

    def count(self, batch: Any) -> int:
        return len(batch.y)

    def sentences(self, batch: Any) -> int:
        return 2

    def rounded(self, model: Any, batch: Any) -> Any:
        return batch

    def loss(self, model: Any, batch: Any, smoothing: float) -> Loss:
        self.fault(batch)
        total = (model(batch.x) - batch.y).square().sum()
        return Loss(total * (1 - smoothing), total.detach())


def updates_agree(
    tape: StandIn, sizes: list[list[int]], toys: Any, task: Regression = Regression(), by: Any = "tokens"  # noqa: B008
) -> Recorded:  # fmt: skip
    """Compare gradients and sums of updates, each of new numbers, with those that are computed."""
    torch.manual_seed(0)
    model: Any = Branching()
    recorded = Recorded(task, model, 0.25, CPU, tape, by)  # pyright: ignore[reportArgumentType] - trains, and no more
    for turn, counts in enumerate(sizes):
        batches = [toys.rows(turn, place, 0, count=count) for place, count in enumerate(counts)]
        totals, tokens = recorded(batches)
        mine = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        model.zero_grad(set_to_none=True)
        wanted, count = accumulate(Regression(), model, batches, 0.25, CPU, by)  # pyright: ignore[reportArgumentType]
        theirs = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        model.zero_grad(set_to_none=True)
        assert tokens == count
        assert torch.allclose(totals, wanted)
        assert mine.keys() >= theirs.keys()
        for name, slope in mine.items():
            assert torch.allclose(slope, theirs.get(name, torch.zeros_like(slope)), atol=1e-6)
        assert not any(name.startswith("never") for name in mine)
    return recorded


def test_a_shape_is_computed_twice_then_recorded_and_played(toys: Any):
    tape = StandIn()
    updates_agree(tape, [[3], [3], [5], [3], [3], [5], [5], [2]], toys)
    assert (tape.recorded, tape.played) == (2, 3)


@pytest.mark.parametrize("by", ["tokens", "sentences"])
def test_several_batches_of_an_update_are_summed(toys: Any, by: str):
    tape = StandIn()
    updates_agree(tape, [[3, 5], [5, 3], [3, 3], [2, 5], [5, 2], [2, 2]], toys, by=by)
    assert tape.recorded == 3


def test_a_parameter_may_get_its_first_gradient_later(toys: Any):
    updates_agree(StandIn(), [[2], [2], [2], [6], [6], [6], [2], [6]], toys)


def test_so_many_shapes_are_recorded_and_no_more(toys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST", 1)
    tape = StandIn()
    updates_agree(tape, [[3], [3], [3], [5], [5], [5], [5], [3]], toys)
    assert (tape.recorded, tape.played) == (1, 2)


def test_a_shape_that_waits_is_always_computed(toys: Any):
    tape = StandIn(waits=[False, True])
    updates_agree(tape, [[3], [3], [3], [2, 5], [3, 5], [5], [5], [3, 5]], toys)
    assert (tape.recorded, tape.played) == (1, 4)  # once in vain


def test_a_model_that_waits_from_the_beginning_is_not_recorded(toys: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="attnbench")
    tape = StandIn(waits=[True])
    updates_agree(tape, [[3], [3], [3], [3], [5], [5], [5]], toys)
    assert tape.recorded == 0
    assert caplog.text.count("not recorded") == 1


def test_where_there_is_no_memory_to_record_a_shape_it_is_computed(toys: Any):
    tape = StandIn(fails=[torch.cuda.OutOfMemoryError("full")])
    updates_agree(tape, [[3], [3], [3], [3], [5], [5], [5]], toys)
    assert tape.recorded == 1


def test_where_records_leave_no_memory_they_are_let_go(toys: Any, caplog: pytest.LogCaptureFixture):
    faults = [torch.cuda.OutOfMemoryError("full")]

    def fault(batch: Any) -> None:
        if len(batch.y) == 7 and faults:
            raise faults.pop()

    tape = StandIn()
    updates_agree(tape, [[3], [3], [3], [3, 7], [3], [7], [5], [5], [5]], toys, Regression(fault))
    assert (tape.recorded, tape.played) == (1, 2)
    assert "memory is full" in caplog.text


def test_without_records_a_full_memory_is_an_error(toys: Any):
    def fault(batch: Any) -> None:
        raise torch.cuda.OutOfMemoryError("full")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        updates_agree(StandIn(), [[3]], toys, Regression(fault))


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("not so\nmore"), "not so"), (RuntimeError(), "RuntimeError")]
)
def test_what_cannot_be_recorded_is_an_error_that_names_the_switch(error: Exception, told: str, toys: Any):
    with pytest.raises(AttnbenchError, match=rf"\({told}\); set ATTNBENCH_GRAPHS=0"):
        updates_agree(StandIn(fails=[error]), [[3], [3], [3]], toys)


def test_what_draws_again_in_backward_refuses_to_be_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked, "LIMIT", 1)
    attention = {"default": {"transform": {"kind": "topk", "k": 2}, "backend": "dense"}}
    raw = {"kind": "transformer", "layers": 1, "width": 8, "heads": 2, "ffn": 8, "tie": "none", "attention": attention}
    task: Any = tasks.parse({"kind": "copying", "dataset": "copy"}).bind()
    for dropout in (0.0, 0.5):
        model = laws.build({**raw, "attention_dropout": dropout}).train()
        with waiting.forbid():
            if dropout:
                with pytest.raises(RuntimeError, match=waiting.REFUSED):
                    gradients(task, model, a_batch(), 1, 0.1, CPU)
            else:
                gradients(task, model, a_batch(), 1, 0.1, CPU)
        gradients(task, model, a_batch(), 1, 0.1, CPU)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")]
)
def test_memory_that_a_graph_lacks_is_memory_too(error: RuntimeError, toys: Any):
    tape = StandIn(fails=[error])
    updates_agree(tape, [[3], [3], [3], [3], [5], [5], [5]], toys)
    assert tape.recorded == 1


@pytest.mark.parametrize("fields", [
    {"clip": 0.5}, {"accumulate": 2, "normalization": "sentences"}, {"clip": 0.5, "optimizer": "adamw"},
], ids=str)  # fmt: skip
def test_a_training_from_records_is_the_training(fields: dict[str, Any], toys: Any, monkeypatch: pytest.MonkeyPatch):
    """With dropout, validations and checkpoints between, and cut off once."""
    fields = {**fields, "max_steps": 24, "log_every": 3, "validate_every": 6}
    whole = toys(name="whole", **fields)
    whole()
    tapes: list[StandIn] = []

    def recorded(task: Any, model: torch.nn.Module, smoothing: float, runtime: Runtime, by: Any) -> Recorded:
        tapes.append(StandIn())
        task.rounded = lambda model, batch: batch
        return Recorded(task, model, smoothing, runtime, tapes[-1], by)

    monkeypatch.setattr(loop, "accumulator", recorded)
    for steps in (12, 24):
        played = toys(name="played", **{**fields, "max_steps": steps})
        played()
    assert all(tape.played for tape in tapes)
    assert played.log.of("train/loss")[-1] == pytest.approx(whole.log.of("train/loss")[-1], rel=1e-5)
    for name, weights in whole.weights(24).items():
        torch.testing.assert_close(played.weights(24)[name], weights, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not installed(), reason="Triton is not installed")
def test_bounds_that_leave_no_weights_spoil_the_loss_where_nothing_may_wait(monkeypatch: pytest.MonkeyPatch):
    """Whoever looks for the place then is told."""
    monkeypatch.setattr(_bounded._bounded_gpu, "serves", lambda *given: True)
    csparsemax = build_transform("csparsemax")
    scores, upper = torch.zeros(2, 4, requires_grad=True), torch.tensor([[0.5] * 4, [0.1] * 4])
    with waiting.forbid():
        weights = csparsemax(scores, upper=upper)
    weights.sum().backward()
    assert scores.grad is not None
    for each in (weights, scores.grad):
        assert each[0].isfinite().all()
        assert each[1].isnan().all()
    with pytest.raises(ValueError, match="sum to less than 1"):
        csparsemax(scores, upper=upper)


CYCLE = """
import gc, sys, torch
from torch.utils.checkpoint import checkpoint
from attnbench.train import recorded
recorded._settle_checkpoints()
gc.collect()
gc.disable()
weight = torch.ones(3, requires_grad=True)

def node():
    return weight.expand_as(weight).grad_fn.next_functions[0][0]

def loss():
    held = weight * 2
    node().metadata["seen"] = True
    return checkpoint(torch.sin, held, use_reentrant=False).sum()

loss().backward()
print("seen" in node().metadata)
"""


def test_no_way_back_of_gradients_is_left_in_a_cycle():
    """In a process of its own: torch 2.13 leaves one at the first use of checkpoint."""
    done = subprocess.run([sys.executable, "-c", CYCLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]
