from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from attnbench.core.errors import AttnbenchError
from attnbench.train.state import checkpoint_steps, load_average


def weights(toy: Any, step: int) -> dict[str, Tensor]:
    return load_file(toy.log.checkpoints / f"step-{step}" / "model.safetensors")


def moments(toy: Any, step: int) -> Tensor:
    """Adam's first moments, in one row: after one update a tenth of the gradient."""
    state = torch.load(toy.log.checkpoints / f"step-{step}" / "state.pt", weights_only=True)
    return torch.cat([entry["exp_avg"].flatten() for entry in state["optimizer"]["state"].values()])


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
        mean = sum(weights(toy, step)[name].double() for step in (8, 10, 12)) / 3
        assert torch.allclose(tensor.double(), torch.as_tensor(mean), rtol=1e-7, atol=1e-9)


def test_patience(toys: Any):
    toy = toys(toys.Task([5.0, 4.0, 4.0, 4.5, 1.0]), max_steps=100, patience=2)
    outcome = toy()
    assert outcome.ending.text == "stopped early at step 8: no better for 2 validations"
    assert outcome.state.best_step == 4
    again = toy()
    assert again.ending == outcome.ending
    assert toy.task.losses == [1.0]  # nothing was run a second time


def offset(toys: Any, losses: list[float]) -> Any:
    """Adds to the loss of each epoch in turn, a token; gradients are left alone."""
    task = toys.Task()
    loss = task.loss

    def shifted(model: Any, batch: Any, smoothing: float) -> Any:
        epoch = len(task.seen) // toys.per_epoch
        found = loss(model, batch, smoothing)
        nll = torch.tensor(losses[epoch] * task.count(batch))
        return found._replace(total=found.total * 0 + nll, nll=nll)

    task.loss = shifted
    return task


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_epochs_are_counted_in_batches(toys: Any, accumulate: int):
    toy = toys(offset(toys, [1.0] * 3), max_steps=1000, max_epochs=2, accumulate=accumulate)
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
        toys.Task(), validator=lambda model: scores.pop(0), select="bleu", validate_bleu=True, patience=2, max_steps=99
    )
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


def test_accumulated_batches_give_the_gradient_of_one_big_batch(toys: Any, monkeypatch: pytest.MonkeyPatch):
    toy = toys(max_steps=1, accumulate=3, log_every=1, name="parts")
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
    ((model(x) - y).square().sum() / len(y)).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert torch.allclose(moments(toy, 1) * 10, gradient, rtol=1e-5, atol=1e-6)
    assert toy.log.of("train/grad_norm") == [pytest.approx(gradient.norm().item(), rel=1e-5)]


def test_the_gradient_is_clipped_and_its_own_norm_logged(toys: Any):
    free, clipped = toys(max_steps=1, log_every=1, name="free"), toys(max_steps=1, log_every=1, clip=0.01, name="clip")
    free()
    clipped()
    norm = free.log.of("train/grad_norm")[0]
    assert norm > 0.1
    assert clipped.log.of("train/grad_norm") == [norm]
    assert (moments(clipped, 1) * 10).norm().item() == pytest.approx(0.01, rel=1e-3)
    assert torch.allclose(moments(clipped, 1) / 0.01, moments(free, 1) / norm, rtol=1e-3, atol=1e-6)


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
    assert {tensor.dtype for tensor in weights(toy, 4).values()} == {torch.float32}
    assert all(math.isfinite(value) for value in toy.log.of("train/loss"))


def poison_input(at: int) -> Any:
    count = 0

    def poison(batch: Any) -> None:
        nonlocal count
        count += 1
        if count >= at:
            batch.x[0, 0] = math.nan

    return poison


def test_a_number_lost_before_any_checkpoint_is_an_outcome_without_weights(toys: Any):
    toy = toys(toys.Task(before_loss=poison_input(2)))
    outcome = toy()
    assert outcome.ending == (
        "diverged", 2, 1, "diverged at step 2, in epoch 1: output of 0 is not finite", "output of 0 is not finite",
    )  # fmt: skip
    assert outcome.diverged
    assert not outcome.scorable
    assert checkpoint_steps(toy.log.checkpoints) == []
    assert toy.log.lines[-1] == {"step": 2, "event": outcome.ending.text}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_number_lost_after_a_checkpoint_ends_the_training(toys: Any, accumulate: int):
    toy = toys(toys.Task(before_loss=poison_input(5 * accumulate)), accumulate=accumulate)
    outcome = toy()
    assert outcome.diverged
    assert outcome.scorable
    epoch = 4 * accumulate // toys.per_epoch + 1
    assert outcome.ending.text == f"diverged at step 5, in epoch {epoch}: output of 0 is not finite"
    assert outcome.ending[:3] == ("diverged", 5, epoch)
    assert (outcome.state.step, outcome.state.best_step) == (4, 4)
    assert toy.log.lines[-1] == {"step": 5, "event": outcome.ending.text}
    assert checkpoint_steps(toy.log.checkpoints) == [2, 4]
    before = toy.log.untimed()
    toy.task.before_loss = poison_input(1)
    assert toy().ending.text == outcome.ending.text  # a second call tells the same
    assert toy.log.untimed() == before


def test_a_parameter_that_is_lost_is_named(toys: Any, monkeypatch: pytest.MonkeyPatch):
    toy = toys(max_steps=4)
    broken = toys.model()

    def poison(batch: Any) -> None:
        if len(toy.task.seen) == 3:
            with torch.no_grad():
                broken[3].weight[0, 1] = math.inf

    toy.task.before_loss = poison
    monkeypatch.setitem(toy.__call__.__func__.__globals__, "toy_model", lambda: broken)
    assert toy().ending.text == "diverged at step 3, in epoch 1: parameter 3.weight is not finite"


def test_a_gradient_that_is_lost_is_named_where_it_is_looked_at(toys: Any):
    task = toys.Task()
    loss = task.loss

    def steep(model: Any, batch: Any, smoothing: float) -> Any:
        found = loss(model, batch, smoothing)
        return found._replace(total=found.total + 0 * (model[3].bias - model[3].bias.detach()).sum().sqrt())

    task.loss = steep
    assert toys(task, clip=1.0)().ending.seen == "gradient of 3.bias is not finite"


def test_a_loss_that_is_lost_in_itself_is_called_so(toys: Any):
    task = toys.Task()
    loss = task.loss

    def infinite(model: Any, batch: Any, smoothing: float) -> Any:
        found = loss(model, batch, smoothing)
        return found._replace(total=found.total + math.inf)

    task.loss = infinite
    assert toys(task)().ending.seen == "the loss is not finite"


def test_the_best_checkpoint_before_a_divergence_is_kept(toys: Any):
    toy = toys(toys.Task([3.0, 1.0, 2.0, 4.0], before_loss=poison_input(10)), max_steps=20)
    outcome = toy()
    assert outcome.ending[:3] == ("diverged", 10, 2)
    assert outcome.state.best_step == 4
    assert checkpoint_steps(toy.log.checkpoints) == [4, 6, 8]


@pytest.mark.parametrize(("losses", "at"), [
    ([3.0, 1.0, 9.0], (15, 3, "from 1 to 9 nats")),
    ([3.0, 1.0, 9.0, 8.0, 7.5], (15, 3, "from 1 to 7.5 nats")),
    ([1.0, 9.0, 1.5, 9.0], (20, 4, "from 1 to 9 nats")),
    ([1.0, 1e30], (10, 2, "from 1 to 1e+30 nats")),
])  # fmt: skip
def test_a_loss_that_rises_and_stays_there_is_a_divergence(toys: Any, losses: list[float], at: Any):
    toy = toys(offset(toys, losses), max_steps=1000, max_epochs=len(losses), validate_every="epoch")
    outcome = toy()
    assert outcome.diverged
    assert outcome.scorable
    assert outcome.state.step == 5 * len(losses)  # it went to the end of its spec all the same
    step, epoch, words = at
    assert outcome.ending[:3] == ("diverged", step, epoch)
    assert outcome.ending.text.startswith(f"diverged by step {step}, in epoch {epoch}: the training loss rose {words}")
    assert toy().ending == outcome.ending  # read back from the checkpoint


@pytest.mark.parametrize("losses", [[3.0], [9.0, 5.0, 1.0], [1.0, 9.0, 3.0], [1.0, 3.3]])
def test_a_loss_that_comes_back_is_none(toys: Any, losses: list[float]):
    outcome = toys(offset(toys, losses), max_steps=1000, max_epochs=len(losses))()
    assert outcome.ending.kind == "finished"


@pytest.mark.parametrize(("step", "epoch"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_the_epoch_of_an_ending_counts_from_one(toys: Any, step: int, epoch: int):
    """Five updates an epoch; whether training broke down in it, after it at its validation, or came to its end."""
    assert toys(toys.Task(before_loss=poison_input(step)), max_steps=20)().ending[1:3] == (step, epoch)
    broken = toys(toys.Task([1.0] * (step - 1) + [math.nan]), name="broken", max_steps=20, validate_every=1)
    assert broken().ending[1:3] == (step, epoch)
    ended = toys(name="ended", max_steps=step)
    assert ended().ending[:3] == ("finished", step, epoch)
    assert ended().ending[:3] == ("finished", step, epoch)  # read back from the checkpoint


def test_weights_that_validate_to_nothing_are_not_kept(toys: Any):
    toy = toys(toys.Task([2.0, math.nan, 1.0]))
    outcome = toy()
    assert outcome.diverged
    assert outcome.ending.text == "diverged at step 4, in epoch 1: the validation loss is not finite"
    assert checkpoint_steps(toy.log.checkpoints) == [2]
    assert all(math.isfinite(value) for value in toy.log.of("valid/loss"))


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def finished(toy: Any) -> tuple[Any, ...]:
    last = checkpoint_steps(toy.log.checkpoints)[-1]
    return toy.log.untimed(), weights(toy, last), moments(toy, last), checkpoint_steps(toy.log.checkpoints)


def same(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])
    assert torch.equal(one[2], two[2])
    assert one[3] == two[3]


FIELDS: dict[str, Any] = {"max_steps": 23, "log_every": 3, "validate_every": 5, "accumulate": 2, "clip": 0.5}


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"validate_every": "epoch"}], ids=str)
def test_a_training_cut_off_anywhere_ends_as_if_it_had_not_been(toys: Any, changes: dict[str, Any]):
    whole = toys(name="whole", **FIELDS | changes)
    whole()
    cut = toys(name="cut", **FIELDS | changes)

    def kill(batch: Any) -> None:
        if len(cut.task.seen) in (3, 7, 20, 28, 45):  # counted over all attempts
            raise Killed

    cut.task.before_loss = kill
    deaths = 0
    while True:
        try:
            outcome = cut()
            break
        except Killed:
            deaths += 1
    assert deaths == 5
    assert outcome.state.step == 23
    assert outcome.resumed_seconds > 0
    same(finished(cut), finished(whole))


@pytest.mark.parametrize("victim", ["torch.save", "attnbench.train.state.save_file", "attnbench.core.files.os.replace"])
@pytest.mark.parametrize("late", [False, True])
def test_a_kill_while_a_checkpoint_is_written(toys: Any, monkeypatch: pytest.MonkeyPatch, victim: str, late: bool):
    whole, cut = toys(name="whole", **FIELDS), toys(name="cut", **FIELDS)
    whole()
    with monkeypatch.context() as patch:
        module, _, name = victim.rpartition(".")
        owner: Any = __import__("importlib").import_module(module.removesuffix(".os")) if module else None
        owner = owner.os if module.endswith(".os") else owner
        real, calls = getattr(owner, name), 0

        def dies(*arguments: Any, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3 and not late:
                raise Killed
            real(*arguments, **options)
            if calls == 3:
                raise Killed

        patch.setattr(owner, name, dies)
        with pytest.raises(Killed):
            cut()
    cut()
    same(finished(cut), finished(whole))


def test_a_kill_before_old_checkpoints_are_removed(toys: Any, monkeypatch: pytest.MonkeyPatch):
    whole, cut = toys(name="whole"), toys(name="cut")
    whole()
    with monkeypatch.context() as patch:
        patch.setattr("attnbench.train.loop.prune", lambda folder, keep: dies() if 6 in keep else None)

        def dies() -> None:
            raise Killed

        with pytest.raises(Killed):
            cut()
    assert checkpoint_steps(cut.log.checkpoints) == [2, 4, 6]
    cut()
    same(finished(cut), finished(whole))


def test_lines_past_the_checkpoint_are_cut(toys: Any):
    toy = toys(max_steps=6, validate_every=4, log_every=1)

    def kill(batch: Any) -> None:
        if len(toy.task.seen) == 6:
            raise Killed

    toy.task.before_loss = kill
    with pytest.raises(Killed):
        toy()
    assert [line["step"] for line in toy.log.lines] == [1, 2, 3, 4, 4, 5]
    toy()
    assert [line["step"] for line in toy.log.lines] == [1, 2, 3, 4, 4, 5, 6, 6]


def test_a_damaged_checkpoint_stops_the_training_and_the_mend_helps(toys: Any, tmp_path: Path):
    whole, toy = toys(name="whole"), toys()
    whole()
    toy()
    newest = toy.log.checkpoints / "step-6"
    (newest / "state.pt").write_bytes(b"")
    with pytest.raises(AttnbenchError, match=r"step-6/state\.pt: cannot be read.*remove the folder"):
        toy()
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    toy()
    same(finished(toy), finished(whole))
