"""When a training ends, and why: its spec is met, nothing gets better, or it has come apart."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from attnbench.train.spec import TrainSpec
from attnbench.train.state import TrainState, Window

RISE = math.log(10)
"""A training has diverged once an epoch's loss lies so many nats a token above the lowest: what is learnt was ten times
as likely. Dropout, noise and overfitting do not do that to the loss of whole epochs."""


class Ending(NamedTuple):
    """Why a training ended, at which update and in which pass over the data, both counted from 1.

    The log counts passes otherwise: the `epoch` of its lines says how many are done. text: one line for the table.
    seen: of a divergence, what was not finite, or that the loss rose and stayed high; the step is then where it had, or
    the last one of a first pass.
    """

    kind: Literal["finished", "stopped_early", "diverged"]
    step: int
    epoch: int
    text: str
    seen: str = ""


def watch(state: TrainState, passed: Window) -> None:
    """Note whether the loss of an epoch that is done lies far above the least one so far."""
    nll = passed.nll / max(1, passed.tokens)
    state.lowest = nll if state.lowest is None else min(state.lowest, nll)
    if nll <= state.lowest + RISE:
        state.risen = None
    else:
        first = state.risen[:2] if state.risen else (state.step, state.cursor[0])
        state.risen = (*first, nll)


def ending_of(state: TrainState, spec: TrainSpec) -> Ending | None:
    """Why a training that stands there ends; None while it goes on."""
    ending, risen = _end(state, spec), _risen(state)
    if ending is None or risen is None:
        return ending
    step, epoch, nll = risen
    seen = f"the training loss rose from {state.lowest:.3g} to {nll:.3g} nats a token and stayed there"
    return Ending("diverged", step, epoch, f"diverged by step {step}, in epoch {epoch}: {seen}", seen)


def _risen(state: TrainState) -> tuple[int, int, float] | None:
    """Where the loss left the least one behind for good. A first pass, done or not, is one of few updates perhaps, in
    whose mean a moment may weigh: there the last validation must say so, too."""
    if state.cursor[0] > 1 or state.lowest is None:
        return state.risen
    if state.newest is None or state.newest <= state.lowest + RISE:
        return None
    nll = state.passed.nll / max(1, state.passed.tokens)
    first = (state.step, 1, nll) if nll > state.lowest + RISE else None
    return state.risen if state.cursor[0] else first


def _end(state: TrainState, spec: TrainSpec) -> Ending | None:
    step, epoch = state.step, epoch_of(state, state.step)
    if step >= spec.max_steps:
        return Ending("finished", step, epoch, f"finished at step {step}")
    if spec.max_epochs is not None and state.cursor[0] >= spec.max_epochs:
        return Ending("finished", step, epoch, f"finished after {spec.max_epochs} epochs, at step {step}")
    if spec.patience is not None and state.stale >= spec.patience:
        text = f"stopped early at step {step}: no better for {state.stale} validations"
        return Ending("stopped_early", step, epoch, text)
    return None


def epoch_of(state: TrainState, step: int) -> int:
    """The pass over the data that an update belongs to, from 1: the last one made, or the one after it."""
    done, *within = state.cursor
    return done + (step > state.step or any(within))
