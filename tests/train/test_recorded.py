"""Rounded batches have the same loss. What is played is tested on a GPU (conformance/test_gpu.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.core.tree import map_batch
from attnbench.data.base import BOS, EOS, PAD, Batch
from attnbench.tasks import pairs
from attnbench.tasks.base import tasks
from attnbench.train.recorded import accumulator, records
from attnbench.train.runtime import Runtime
from attnbench.train.step import gradients


def neighbour(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(__file__).parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


laws = neighbour("../conformance/test_models.py")
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


@pytest.mark.parametrize("name", ["0", "1"])
def test_a_processor_does_not_look_at_the_switch(name: str, monkeypatch: pytest.MonkeyPatch, toys: Any):
    monkeypatch.setenv("ATTNBENCH_GRAPHS", name)
    test_on_a_processor_nothing_is_recorded(toys)


def test_who_records_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ATTNBENCH_GRAPHS", raising=False)
    gpu = Runtime(torch.device("cuda"))
    assert (records(CPU), records(gpu)) == (False, True)
    monkeypatch.setenv("ATTNBENCH_GRAPHS", "0")
    assert not records(gpu)
