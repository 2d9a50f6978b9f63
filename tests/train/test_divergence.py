"""A training that comes apart ends with an outcome, and with the best weights from before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnbench.train.state import checkpoint_steps


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


def test_a_norm_that_is_too_large_for_finite_gradients_is_called_so(toys: Any):
    task = toys.Task()
    loss = task.loss

    def steep(model: Any, batch: Any, smoothing: float) -> Any:
        found = loss(model, batch, smoothing)
        return found._replace(total=found.total * 1e21)

    task.loss = steep
    assert toys(task, clip=1.0)().ending.seen == "the norm of the gradient is not finite"


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
    ([1.0, 3.31], (10, 2, "from 1 to 3.31 nats")),
])  # fmt: skip
def test_a_loss_that_rises_and_stays_there_is_a_divergence(toys: Any, losses: list[float], at: Any):
    toy = toys(toys.Task(of_epochs=losses), max_steps=1000, max_epochs=len(losses), validate_every="epoch")
    outcome = toy()
    assert outcome.diverged
    assert outcome.scorable
    assert outcome.state.step == 5 * len(losses)  # it went to the end of its spec all the same
    step, epoch, words = at
    assert outcome.ending[:3] == ("diverged", step, epoch)
    assert outcome.ending.text.startswith(f"diverged by step {step}, in epoch {epoch}: the training loss rose {words}")
    assert toy().ending == outcome.ending  # read back from the checkpoint


@pytest.mark.parametrize(("losses", "valid", "diverged"), [
    ([1.0, 9.0, 9.0], 9.0, True),
    ([1.0, 9.0, 9.0, 9.0, 9.0], 9.0, True),
    ([1.0, 9.0, 9.0, 9.0, 9.0, 9.0], 9.0, True),
    ([1.0, 3.2, 3.2], 3.2, False),
    ([1.0, 40.0, 1.0, 1.0], 1.0, False),  # a moment
    ([1.0, 40.0, 1.0, 1.0, 1.0], 1.0, False),
    ([1.0, 40.0, 1.0, 1.0, 1.0, 1.0], 1.0, False),
])  # fmt: skip
def test_a_first_pass_is_watched_from_its_first_update(toys: Any, losses: list[float], valid: float, diverged: bool):
    """Whether it is done or not; its own loss, by which others are judged, holds what came apart."""
    task, steps = toys.Task([valid] * 9, of_epochs=[1.0]), len(losses)

    def take(batch: Any) -> None:
        task.of_epochs = [losses[len(task.seen) - 1]] * 2  # for either epoch

    task.before_loss = take
    toy = toys(task, max_steps=steps, validate_every=1)
    outcome = toy()
    assert outcome.diverged is diverged
    assert outcome.ending.step in (steps, 5)
    if diverged:
        assert outcome.ending.epoch == 1
        assert "the training loss rose from 1 to " in outcome.ending.text
    assert toy().ending == outcome.ending


@pytest.mark.parametrize("losses", [[3.0], [9.0, 5.0, 1.0], [1.0, 9.0, 3.0], [1.0, 3.3]])
def test_a_loss_that_comes_back_is_none(toys: Any, losses: list[float]):
    outcome = toys(toys.Task(of_epochs=losses), max_steps=1000, max_epochs=len(losses))()
    assert outcome.ending.kind == "finished"


@pytest.mark.parametrize(("step", "epoch"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_the_epoch_of_an_ending_counts_from_one(toys: Any, step: int, epoch: int):
    """Five updates an epoch; whether training broke down in it, after it at its validation, or came to its end."""
    assert toys(toys.Task(before_loss=poison_input(step)), max_steps=20)().ending[1:3] == (step, epoch)
    broken = toys(toys.Task([1.0] * (step - 1) + [math.nan]), name="broken", max_steps=20, validate_every=1)
    assert broken().ending[1:3] == (step, epoch)
    ended = toys(toys.Task(of_epochs=[1.0] * 3), name="ended", max_steps=step)
    assert ended().ending[:3] == ("finished", step, epoch)
    assert ended().ending[:3] == ("finished", step, epoch)  # read back from the checkpoint


def test_weights_that_validate_to_nothing_are_not_kept(toys: Any):
    toy = toys(toys.Task([2.0, math.nan, 1.0]))
    outcome = toy()
    assert outcome.diverged
    assert outcome.ending.text == "diverged at step 4, in epoch 1: the validation loss is not finite"
    assert checkpoint_steps(toy.log.checkpoints) == [2]
    assert all(math.isfinite(value) for value in toy.log.of("valid/loss"))
