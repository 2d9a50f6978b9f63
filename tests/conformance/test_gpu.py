"""Every model computes on a GPU what it computes on a processor, and an update there waits for nothing."""

from __future__ import annotations

from typing import Any

import model_cases as laws
import pytest
import torch
import training_cases as steps

from attnbench.attention.scores import additive
from attnbench.core.tree import map_batch
from attnbench.models.base import Sizes, Source, models
from attnbench.search.base import SpecialIds, searches
from attnbench.tasks.base import tasks
from attnbench.train.optim import optimizers, set_rate
from attnbench.train.recorded import accumulator
from attnbench.train.runtime import Runtime
from attnbench.train.step import accumulate, clip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def moved(tree: Any) -> Any:
    if isinstance(tree, Source):
        return Source(*map(moved, (tree.data, tree.valid, tree.fertility)))
    return map_batch(lambda tensor: tensor.cuda(), tree)


@laws.EACH
def test_outputs_and_gradients_are_those_of_a_processor(raw: dict[str, Any]):
    model, found = laws.build(raw).train(), []  # without dropout; cuDNN goes back through nothing else
    source, target_in, valid = laws.batch()
    upstream = torch.randn(
        *valid.shape, laws.VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    upstream[~valid] = 0  # what stands past the end of a sentence is not promised
    for place in (lambda tree: tree, moved):
        model = model.cuda() if place is moved else model
        model.zero_grad()
        logits = laws.logits(model, place(source), place(target_in))
        (logits * place(upstream)).sum().backward()
        slopes = [each.grad.cpu().clone() for each in model.parameters() if each.grad is not None]
        found.append([logits.detach().cpu()[valid], *slopes])
    for mine, theirs in zip(*found, strict=True):
        laws.close(mine, theirs, 1e-9)


@laws.EACH
@pytest.mark.parametrize("search", ["greedy", {"kind": "beam", "size": 3}])
def test_outputs_of_a_search_are_those_of_a_processor(raw: dict[str, Any], search: Any):
    model, source = laws.build(raw), laws.batch()[0]
    special = SpecialIds(bos=laws.BOS, eos=laws.EOS, pad=laws.PAD)
    run = searches.parse(search).build()
    here, there = [], []
    with torch.no_grad():
        here = [best[0] for best in run(model, source, special)]
        there = [best[0] for best in run(model.cuda(), moved(source), special)]
    assert [best.tokens for best in there] == [best.tokens for best in here]
    assert [best.score for best in there] == pytest.approx([best.score for best in here], rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize(
    ("kind", "attention"),
    [*(("transformer", name) for name in steps.ATTENTION), ("convs2s", "softmax"), ("convs2s", "top-k")],
)
def test_an_update_waits_for_nothing(kind: str, attention: str, optimizer: str, precision: Any):
    small = {"layers": 2, "width": 64, "heads": 2, "ffn": 16} if kind == "transformer" else {"layers": 2, "width": 16}
    raw = {"kind": kind, **small, "attention": steps.ATTENTION[attention]}
    model = models.parse(raw).build(Sizes(steps.WORDS, steps.WORDS, True, 0)).cuda().train()
    task: Any = tasks.parse({"kind": "copying", "dataset": "copy"}).bind()
    update = optimizers.parse(optimizer).build(model.parameters())
    set_rate(update, 0.1)
    runtime = Runtime(torch.device("cuda"), precision)

    def run() -> torch.Tensor:
        totals, _ = accumulate(task, model, [steps.a_batch()], 0.1, runtime)
        clip(model, 1.0)
        update.step()
        update.zero_grad(set_to_none=True)
        return totals

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        totals = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(totals.isfinite().all())


def recorded_and_computed(attention: Any, precision: Any, dropout: float = 0.0) -> tuple[Any, Any, torch.nn.Module]:
    """Two ways to the gradients of one model: recorded ones, and those that are computed each time."""
    raw = {"kind": "transformer", "layers": 2, "width": 64, "heads": 2, "ffn": 16, "dropout": 0.0, "max_length": 14,
           "attention_dropout": dropout, "attention": attention}  # fmt: skip
    return of(raw, precision)


def of(raw: dict[str, Any], precision: Any) -> tuple[Any, Any, torch.nn.Module]:
    torch.manual_seed(0)
    model = models.parse(raw).build(Sizes(steps.WORDS, steps.WORDS, True, 0)).cuda().train()
    task: Any = tasks.parse({"kind": "copying", "dataset": "copy"}).bind()
    runtime = Runtime(torch.device("cuda"), precision)
    recorded = accumulator(task, model, 0.1, runtime)
    return recorded, lambda given: accumulate(task, model, given, 0.1, runtime), model


def some_batches(count: int) -> list[Any]:
    """Other words and lengths, of two shapes."""
    draw, found = torch.Generator().manual_seed(1), []
    for turn in range(count):
        batch = steps.a_batch()
        words = torch.randint(5, steps.WORDS, batch.source.shape, generator=draw)
        batch = batch._replace(source=words, target_in=words, target_out=words.roll(1, 1))
        if turn % 2:
            batch = map_batch(lambda tensor: tensor[1:], batch)
        found.append(batch)
    return found


def slopes(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).double()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", steps.ATTENTION)
def test_recorded_gradients_are_those_that_are_computed(attention: str, precision: Any):
    recorded, computed, model = recorded_and_computed(steps.ATTENTION[attention], precision)
    compare(recorded, computed, model, 1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("pattern", ["random", "bigbird"])
def test_recorded_gradients_of_patterns_that_draw_are_those_that_are_computed(pattern: str):
    attention = {"default": {"pattern": pattern, "budget": 4}, **steps.DENSE_CROSS}
    compare(*recorded_and_computed(attention, "fp32"), 1e-5)


RECURRENT: dict[str, Any] = {
    "lstm": {"layers": 2},
    "lstm, fed": {"layers": 1, "bidirectional": True, "input_feeding": "attentional"},
    "lstm, coverage": {"layers": 1, "attention": {"cross": {"score": "additive", "coverage": "simple"}}},
    "lstm, entmax15": {"layers": 1, "attention": {"cross": {"score": "bilinear", "transform": "entmax15"}}},
    **{
        f"lstm, {kind}": {"layers": 1, "fertility": {"kind": "constant", "value": 2},
                          "attention": {"cross": {"transform": kind, "bias": {"kind": "exhaustion", "c": 0.2}}}}
        for kind in ("csoftmax", "csparsemax")
    },
    "lstm, memory": {"layers": 1, "attention": {"cross": {"module": {"kind": "fixed_memory", "slots": 4}}}},
    "gru": {"layers": 1, "bidirectional": True, "query": "previous", "readout": "concat"},
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT)
def test_recorded_gradients_of_recurrent_models_are_those_that_are_computed(name: str):
    raw = {"kind": name.split(",")[0], "width": 32, "dropout": 0.0, **RECURRENT[name]}
    compare(*of(raw, "fp32"), 1e-4)  # cuDNN adds up in another order


def test_units_that_are_made_again_in_backward_are_recorded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(additive, "BLOCK", 1 << 12)
    attention = {"cross": {"score": "additive"}}
    recorded, computed, model = of(
        {"kind": "lstm", "layers": 1, "width": 32, "dropout": 0.0, "attention": attention}, "fp32"
    )
    compare(recorded, computed, model, 1e-4)


def compare(recorded: Any, computed: Any, model: torch.nn.Module, tolerance: float) -> None:
    for batch in some_batches(8):
        totals, tokens = recorded([batch])
        mine = slopes(model)
        model.zero_grad(set_to_none=True)
        wanted, count = computed([batch])
        theirs = slopes(model)
        model.zero_grad(set_to_none=True)
        assert tokens == count
        assert torch.allclose(totals, wanted, rtol=tolerance)
        assert float((mine - theirs).norm() / theirs.norm()) < tolerance
    assert len(recorded._records) == 2


def test_recorded_gradients_of_several_batches_are_summed():
    recorded, computed, model = recorded_and_computed({}, "fp32")
    for _ in range(3):
        totals, tokens = recorded(some_batches(4))
        mine = slopes(model)
        model.zero_grad(set_to_none=True)
        wanted, count = computed(some_batches(4))
        assert tokens == count
        assert torch.allclose(totals, wanted, rtol=1e-5)
        assert float((mine - slopes(model)).norm() / mine.norm()) < 1e-5
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("transform", ["softmax", {"kind": "topk", "k": 4}, "entmax15"])
def test_what_is_dropped_is_drawn_anew_each_time_a_record_is_played(transform: Any):
    recorded, _, _ = recorded_and_computed({"default": {"transform": transform}}, "bf16", dropout=0.3)
    seen = {float(recorded([steps.a_batch()])[0][0]) for _ in range(6)}
    assert len(recorded._records) == 1
    assert len(seen) == 6


STEEP = {"kind": "entmax", "alpha": 2.5}  # which has no kernel, and asks whether its search has ended


def test_a_model_that_waits_for_the_gpu_is_not_recorded(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger="attnbench")
    raw = {"kind": "lstm", "layers": 1, "width": 16, "attention": {"cross": {"transform": STEEP}}}
    model = models.parse(raw).build(Sizes(steps.WORDS, steps.WORDS, True, 0))
    task: Any = tasks.parse({"kind": "copying", "dataset": "copy"}).bind()
    recorded = accumulator(task, model.cuda().train(), 0.1, Runtime(torch.device("cuda")))
    for _ in range(3):
        assert bool(recorded([steps.a_batch()])[0].isfinite().all())
    assert "not recorded" in caplog.text
