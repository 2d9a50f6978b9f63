from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from attnbench.core import native
from attnbench.core.errors import AttnbenchError
from attnbench.tasks.base import EVAL_TOKENS
from attnbench.train.state import checkpoint_steps, load_average


def test_it_learns_and_ends_where_the_spec_says(toys: Any):
    toy = toys(max_steps=60, validate_every=20, log_every=20, schedule={"kind": "constant", "lr": 0.05})
    outcome = toy()
    assert (outcome.ending.text, outcome.diverged, outcome.state.step) == ("finished at step 60", False, 60)
    losses = toy.log.of("valid/loss")
    assert losses[-1] < losses[0] / 2


def test_the_lines_of_the_log(toys: Any):
    toy = toys(max_steps=5, log_every=2, validate_every=4)
    toy()
    trained = [line for line in toy.log.lines if "train/loss" in line]
    validated = [line for line in toy.log.lines if "valid/loss" in line]
    assert [line["step"] for line in trained] == [2, 4]
    assert [line["step"] for line in validated] == [4, 5]
    assert set(trained[0]) == {
        "step", "epoch", "elapsed_s", "train/loss", "train/nll", "train/ppl", "train/lr", "train/grad_norm",
        "train/tokens", "train/tokens_per_s", "train/max_mem_mb",
    }  # fmt: skip
    assert set(validated[0]) == {"step", "epoch", "elapsed_s", "valid/loss", "valid/ppl", "valid/seconds"}
    assert [line["train/tokens"] for line in trained] == [2 + 3, 2 + 3 + 4 + 5]
    assert [line["epoch"] for line in validated] == [0, 1]  # the fifth batch is the last of its epoch
    assert trained[0]["train/nll"] == trained[0]["train/loss"]
    assert trained[0]["train/lr"] == 0.01


def test_what_compiling_takes_is_no_part_of_it(toys: Any, monkeypatch: pytest.MonkeyPatch):
    """By the clock that stands meanwhile; here it is read at the start, and once an update."""
    ticks = itertools.count()
    monkeypatch.setattr(native, "clock", lambda: float(next(ticks)))
    assert toys(max_steps=5, validate_every=9)().state.seconds == 5.0


def test_the_loss_of_a_line_is_the_mean_over_its_tokens(toys: Any):
    toy = toys(max_steps=4, log_every=4, schedule={"kind": "constant", "lr": 1e-30}, label_smoothing=0.5)
    toy()
    (line,) = [line for line in toy.log.lines if "train/loss" in line]
    assert line["train/loss"] == pytest.approx(line["train/nll"] / 2)
    assert line["train/ppl"] == pytest.approx(math.exp(line["train/nll"]))
    assert line["train/tokens"] == sum(len(batch.y) for batch in toy.task.seen)
    model = toys.model().eval()
    dry = sum((model(batch.x) - batch.y).square().sum().item() for batch in toy.task.seen) / line["train/tokens"]
    assert line["train/nll"] == pytest.approx(dry, rel=0.5)  # dropout is all that lies between


def test_the_best_checkpoint_is_kept_to_the_end(toys: Any):
    toy = toys(toys.Task([5.0, 3.0, 4.0, 6.0, 3.5, 3.0]), max_steps=12)
    state = toy().state
    assert (state.best_step, state.best, state.stale) == (4, -3.0, 4)  # as good is no better
    assert checkpoint_steps(toy.log.checkpoints) == [4, 10, 12]


def test_checkpoints_to_average_are_kept(toys: Any):
    toy = toys(toys.Task([5.0, 1.0, 4.0, 6.0, 3.5, 3.0]), max_steps=12, average=3)
    toy()
    assert checkpoint_steps(toy.log.checkpoints) == [4, 8, 10, 12]
    toys_own = toys.model()
    load_average(toys_own, toy.log.checkpoints, [8, 10, 12])
    for name, tensor in toys_own.state_dict().items():
        mean = sum(toy.weights(step)[name].double() for step in (8, 10, 12)) / 3
        assert torch.allclose(tensor.double(), torch.as_tensor(mean), rtol=1e-7, atol=1e-9)


def test_patience(toys: Any):
    toy = toys(toys.Task([5.0, 4.0, 4.0, 4.5, 1.0]), max_steps=100, patience=2)
    outcome = toy()
    assert outcome.ending.text == "stopped early at step 8: no better for 2 validations"
    assert outcome.state.best_step == 4
    again = toy()
    assert again.ending == outcome.ending
    assert toy.task.losses == [1.0]  # nothing was run a second time


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_epochs_are_counted_in_batches(toys: Any, accumulate: int):
    toy = toys(toys.Task(of_epochs=[1.0] * 3), max_steps=1000, max_epochs=2, accumulate=accumulate)
    outcome = toy()
    steps = math.ceil(2 * toys.per_epoch / accumulate)
    assert outcome.state.step == steps
    assert outcome.ending.text == f"finished after 2 epochs, at step {steps}"
    assert len(toy.task.seen) == steps * accumulate
    assert toy.log.lines[-1]["step"] == steps  # the end is validated wherever it falls
    assert "valid/loss" in toy.log.lines[-1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_validation_at_the_end_of_each_epoch(toys: Any, accumulate: int):
    toy = toys(max_steps=1000, max_epochs=3, accumulate=accumulate, validate_every="epoch", log_every=1)
    toy()
    steps = [math.ceil(number * toys.per_epoch / accumulate) for number in (1, 2, 3)]
    validated = [line for line in toy.log.lines if "valid/loss" in line]
    passed = [line for line in toy.log.lines if "epoch/train_loss" in line]
    assert [line["step"] for line in validated] == [line["step"] for line in passed] == steps
    assert [line["epoch"] for line in passed] == [1, 2, 3]
    assert set(checkpoint_steps(toy.log.checkpoints)) <= set(steps)
    trained = [line for line in toy.log.lines if "train/loss" in line]
    seen = 0
    for begin, end, line, valid in zip([0, *steps], steps, passed, validated, strict=False):
        own = trained[begin:end]
        tokens = own[-1]["train/tokens"] - seen
        seen = own[-1]["train/tokens"]
        assert line["epoch/tokens"] == tokens
        share = [each["train/tokens"] - before for each, before in zip(own, _before(own, seen - tokens), strict=True)]
        nll = sum(each["train/nll"] * part for each, part in zip(own, share, strict=True)) / tokens
        assert line["epoch/train_loss"] == pytest.approx(nll)
        assert line["epoch/train_ppl"] == pytest.approx(math.exp(nll))
        assert line["epoch/valid_loss"] == valid["valid/loss"]
        assert line["epoch/seconds"] > 0


def _before(lines: list[dict[str, Any]], first: int) -> list[int]:
    return [first, *(line["train/tokens"] for line in lines[:-1])]


def test_the_end_of_a_training_is_validated_inside_an_epoch_too(toys: Any):
    toy = toys(max_steps=7, validate_every="epoch")
    toy()
    assert [line["step"] for line in toy.log.lines if "valid/loss" in line] == [5, 7]
    assert [line["step"] for line in toy.log.lines if "epoch/train_loss" in line] == [5]


def test_bleu_of_training_sentences_is_in_the_curve_where_asked(toys: Any):
    scores = [10.0, 20.0, 30.0, 40.0]
    fields = {"max_steps": 10, "validate_every": "epoch", "validate_bleu": True}
    toy = toys(toys.Task(), validator=lambda model: scores.pop(0), train_bleu=7, **fields)
    toy()
    assert toy.log.of("epoch/valid_bleu") == [10.0, 30.0]
    assert toy.log.of("epoch/train_bleu") == [27.0, 47.0]


@pytest.mark.parametrize(("fields", "words"), [
    ({"validate_every": "epochs"}, "from 1 on, or 'epoch', not 'epochs'"),
    ({"validate_every": 0}, "from 1 on, or 'epoch', not 0"),
    ({"validate_every": True}, "not True"),
    ({"train_bleu": 5}, "train_bleu needs validate_every: epoch and validate_bleu: true"),
])  # fmt: skip
def test_faults_of_the_curves(toys: Any, fields: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        toys.spec(**fields)


def test_validation_bleu_chooses_where_asked(toys: Any):
    scores = [1.0, 3.0, 2.0]
    toy = toys(toys.Task(), validator=lambda model: scores.pop(0), select="bleu", validate_bleu=True)
    state = toy().state
    assert (state.best_step, state.best) == (4, 3.0)
    assert toy.log.of("valid/bleu") == [1.0, 3.0, 2.0]


def test_patience_begins_when_bleu_leaves_zero(toys: Any):
    """Without smoothing it is 0 for a while, and the newest weights are then the best there are."""
    scores = [0.0, 0.0, 0.0, 2.0, 2.0, 1.0]
    toy = toys(
        toys.Task(of_epochs=[1.0] * 9), validator=lambda model: scores.pop(0), select="bleu", validate_bleu=True,
        patience=2, max_steps=99,
    )  # fmt: skip
    outcome = toy()
    assert outcome.ending.kind == "stopped_early"
    assert (outcome.state.best, outcome.state.stale) == (2.0, 2)  # equal is no better, once it is above 0
    assert not scores


def test_without_bleu_the_best_weights_lie_before_a_divergence(toys: Any):
    toy = toys(
        toys.Task([5.0, 4.0, 5.5, 9.0, 9.5]),
        validator=lambda model: 0.0,
        select="bleu",
        validate_bleu=True,
        max_steps=10,
    )
    assert toy().state.best_step == 6
    assert toy.log.of("valid/bleu") == [0.0] * 5


@pytest.mark.parametrize(("normalization", "by"), [("tokens", 9), ("sentences", 6)])
def test_accumulated_batches_give_the_gradient_of_one_big_batch(
    toys: Any, monkeypatch: pytest.MonkeyPatch, normalization: str, by: int
):
    toy = toys(max_steps=1, accumulate=3, normalization=normalization, log_every=1, name="parts")
    plain = torch.nn.Sequential(*(layer for layer in toys.model() if type(layer).__name__ != "Dropout"))
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}

    def fresh() -> Any:
        plain.load_state_dict(state)
        return plain

    monkeypatch.setitem(toy.__call__.__func__.__globals__, "toy_model", fresh)
    toy()
    seen = toy.task.seen
    assert [len(batch.y) for batch in seen] == [2, 3, 4]
    model = fresh()
    x, y = torch.cat([batch.x for batch in seen]), torch.cat([batch.y for batch in seen])
    model.zero_grad()
    ((model(x) - y).square().sum() / by).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(toy.moments(1) * 10, gradient, rtol=1e-5, atol=1e-6)
    assert toy.log.of("train/grad_norm") == [pytest.approx(gradient.norm().item(), rel=1e-5)]


def test_the_gradient_is_clipped_and_its_own_norm_logged(toys: Any):
    free, clipped = toys(max_steps=1, log_every=1, name="free"), toys(max_steps=1, log_every=1, clip=0.01, name="clip")
    free()
    clipped()
    norm = free.log.of("train/grad_norm")[0]
    assert norm > 0.1
    assert clipped.log.of("train/grad_norm") == [norm]
    assert (clipped.moments(1) * 10).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert torch.allclose(clipped.moments(1) / 0.01, free.moments(1) / norm, rtol=1e-3, atol=1e-6)


def test_bf16_computes_in_bf16_and_keeps_weights_in_float32(toys: Any):
    task = toys.Task()
    kinds = []
    toy = toys(task, precision="bf16", max_steps=4)
    loss = task.loss

    def spy(model: Any, batch: Any, smoothing: float) -> Any:
        kinds.append(model[0](batch.x).dtype)
        return loss(model, batch, smoothing)

    task.loss = spy
    toy()
    assert set(kinds) == {torch.bfloat16}
    assert {tensor.dtype for tensor in toy.weights(4).values()} == {torch.float32}
    assert all(math.isfinite(value) for value in toy.log.of("train/loss"))


@pytest.mark.parametrize("counts", [{"max_steps": 1000, "max_epochs": 2}, {"max_steps": 2, "validate_every": "epoch"}])
def test_an_update_of_several_epochs_is_refused_where_epochs_count(toys: Any, counts: dict[str, Any]):
    """It would go on past the epochs that were asked for, and say that it had kept to them."""
    toy = toys(toys.Task(of_epochs=[1.0] * 9), accumulate=2 * toys.per_epoch + 1, **counts)
    with pytest.raises(
        AttnbenchError, match=r"train.accumulate: the 11 batches of update 1 end two epochs of these data"
    ):
        toy()
    toy = toys(toys.Task(of_epochs=[1.0] * 9), accumulate=2 * toys.per_epoch - 2, **{**counts, "max_steps": 1000})
    with pytest.raises(AttnbenchError, match=r"the 8 batches of update 2 end two epochs of these data"):
        toy()
    steps = {"max_steps": 2, "validate_every": 1}
    toy = toys(toys.Task(of_epochs=[1.0] * 9), accumulate=2 * toys.per_epoch + 1, **steps)
    assert toy().state.step == 2


@pytest.mark.parametrize(("batch_tokens", "wanted"), [(512, EVAL_TOKENS), (2 * EVAL_TOKENS, 2 * EVAL_TOKENS)])
def test_validation_takes_as_much_at_once_as_scores_at_the_end_do(toys: Any, batch_tokens: int, wanted: int):
    task, seen = toys.Task(), []
    validate = task.validate

    def spy(model: Any, data: Any, split: str, tokens: int) -> dict[str, float]:
        seen.append(tokens)
        return validate(model, data, split, tokens)

    task.validate = spy
    toys(task, batch_tokens=batch_tokens)()
    assert seen == [wanted] * 3
