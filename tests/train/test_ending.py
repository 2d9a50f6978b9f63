"""When a training ends, from a state that is written down: which end comes first, and what has come apart."""

from __future__ import annotations

from typing import Any

import pytest

from attnbench.train.ending import RISE, Ending, ending_of, epoch_of, watch
from attnbench.train.spec import TrainSpec
from attnbench.train.state import TrainState, Window

LOW = 2.0
HIGH = LOW + RISE + 0.1
NEAR = LOW + RISE - 0.1


def window(nll: float, tokens: int = 10) -> Window:
    return Window(nll=nll * tokens, tokens=tokens)


def end(state: TrainState, **fields: Any) -> Ending | None:
    return ending_of(state, TrainSpec.model_validate({"max_steps": 10, **fields}))


def kind(state: TrainState, **fields: Any) -> str | None:
    found = end(state, **fields)
    return None if found is None else found.kind


def test_a_training_goes_on_until_its_spec_is_met():
    assert end(TrainState(step=9, cursor=(3, 0, 0), stale=1), max_epochs=4, patience=2) is None


@pytest.mark.parametrize(("state", "fields", "wanted"), [
    (TrainState(step=10, cursor=(1, 0, 4)), {}, ("finished", 10, 2, "finished at step 10")),
    (TrainState(step=6, cursor=(2, 0, 0)), {"max_epochs": 2}, ("finished", 6, 2, "finished after 2 epochs, at step 6")),
    (TrainState(step=6, cursor=(2, 0, 1), stale=3), {"patience": 3},
     ("stopped_early", 6, 3, "stopped early at step 6: no better for 3 validations")),
    (TrainState(step=10, cursor=(2, 0, 0), stale=3), {"patience": 3, "max_epochs": 2},
     ("finished", 10, 2, "finished at step 10")),
])  # fmt: skip
def test_the_end_says_where_it_is(state: TrainState, fields: dict[str, Any], wanted: tuple[Any, ...]):
    assert end(state, **fields) == (*wanted, "")


@pytest.mark.parametrize(("cursor", "made", "coming"), [((0, 0, 0), 0, 1), ((0, 0, 3), 1, 1), ((1, 0, 0), 1, 2),
                                                        ((1, 2, 0), 2, 2)])  # fmt: skip
def test_the_epoch_of_the_last_update_and_of_the_next(cursor: tuple[int, int, int], made: int, coming: int):
    state = TrainState(step=5, cursor=cursor)
    assert (epoch_of(state, 5), epoch_of(state, 6)) == (made, coming)


def test_an_epoch_far_above_the_least_is_noted_where_it_began():
    state = TrainState(step=4, cursor=(1, 0, 0))
    watch(state, window(LOW))
    assert (state.lowest, state.risen) == (LOW, None)
    state.step, state.cursor = 8, (2, 0, 0)
    watch(state, window(HIGH))
    state.step, state.cursor = 12, (3, 0, 0)
    watch(state, window(HIGH + 1, tokens=7))
    assert state.risen == (8, 2, pytest.approx(HIGH + 1))
    assert state.lowest == LOW
    watch(state, window(NEAR))
    assert state.risen is None


def test_what_has_risen_and_stayed_there_has_diverged_whatever_ended_it():
    state = TrainState(step=10, cursor=(4, 0, 0), lowest=LOW, risen=(6, 3, HIGH))
    found = end(state)
    assert found is not None
    assert found[:3] == ("diverged", 6, 3)
    assert found.seen == f"the training loss rose from 2 to {HIGH:.3g} nats a token and stayed there"
    assert found.text == f"diverged by step 6, in epoch 3: {found.seen}"
    assert end(TrainState(step=9, cursor=(4, 0, 0), lowest=LOW, risen=(6, 3, HIGH))) is None


@pytest.mark.parametrize(("passed", "newest", "wanted"), [
    (window(HIGH), HIGH, "diverged"),
    (window(HIGH, tokens=3), HIGH, "diverged"),
    (window(NEAR), HIGH, "finished"),  # the mean of the pass is not high, the validation is
    (window(HIGH), NEAR, "finished"),  # nor the other way round
    (window(HIGH), None, "finished"),
    (Window(), HIGH, "finished"),
])  # fmt: skip
def test_in_a_first_pass_the_last_validation_must_say_so_too(passed: Window, newest: float | None, wanted: str):
    state = TrainState(step=10, cursor=(0, 0, 3), lowest=LOW, passed=passed, newest=newest)
    found = end(state)
    assert found is not None
    assert found.kind == wanted
    if wanted == "diverged":
        assert found[1:3] == (10, 1)


@pytest.mark.parametrize(("newest", "wanted"), [(HIGH, "diverged"), (NEAR, "finished")])
def test_at_the_end_of_a_first_pass_the_validation_must_say_so_too(newest: float, wanted: str):
    state = TrainState(step=10, cursor=(1, 0, 0), lowest=LOW, risen=(10, 1, HIGH), newest=newest)
    assert kind(state) == wanted
    assert kind(TrainState(step=10, cursor=(2, 0, 0), lowest=LOW, risen=(10, 1, HIGH), newest=newest)) == "diverged"
