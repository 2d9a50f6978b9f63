"""The training loop: batch -> loss -> update -> log -> validate -> keep the best."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from attnbench.core import native
from attnbench.core.errors import AttnbenchError
from attnbench.data.base import Cursor
from attnbench.metrics.likelihood import perplexity
from attnbench.search.base import Searcher
from attnbench.tasks.base import Task
from attnbench.train.divergence import first_nonfinite
from attnbench.train.ending import Ending, ending_of, epoch_of, watch
from attnbench.train.optim import set_rate
from attnbench.train.recorded import accumulator
from attnbench.train.runtime import Runtime
from attnbench.train.spec import TrainSpec
from attnbench.train.state import TrainState, Window, checkpoint_steps, load_checkpoint, prune, save_checkpoint
from attnbench.train.step import clip
from attnbench.train.validation import epoch_line, train_bleu, validate

LOST = "the loss or the gradient"
"""What is not finite, where it can no longer be told more closely."""


class Recorder(Protocol):
    """Where a training leaves its log and its checkpoints."""

    checkpoints: Path

    def log(self, record: Mapping[str, Any]) -> None:
        """One line of the log."""
        ...

    def rewind(self, step: int) -> None:
        """Cut the lines of the log that lie past `step`."""
        ...


class Update(NamedTuple):
    """One whose numbers may be on their way from the device: summed loss and nll, the gradient's norm if taken."""

    step: int
    tokens: int
    numbers: Callable[[], list[float]]


class TrainingOutcome(NamedTuple):
    """Where a training stood when it ended. resumed_seconds: training time that lies before this call, resumed_shared:
    of it, in which other programs used the same cores."""

    state: TrainState
    ending: Ending
    resumed_seconds: float = 0.0
    resumed_shared: float = 0.0

    @property
    def diverged(self) -> bool:
        """A number stopped being one, or the loss rose far and stayed there."""
        return self.ending.kind == "diverged"

    @property
    def scorable(self) -> bool:
        """There are weights to score: of a divergence, a checkpoint that lies before it."""
        return not self.diverged or bool(self.state.best_step)


def train(
    task: Task,
    model: nn.Module,
    data: Any,
    spec: TrainSpec,
    *,
    seed: int,
    width: int,
    recorder: Recorder,
    runtime: Runtime,
    validator: Searcher | None = None,
    shared: Callable[[], float] = lambda: 0.0,
) -> TrainingOutcome:
    """Train from the newest checkpoint, or from the start, to the end that the spec names.

    Bit-equal on a processor however often it is cut off and called again: everything the next update depends on is
    in the checkpoint. width: the model's D, which Noam's rule reads. validator: decodes at validations, if they do.
    shared: gives the seconds so far in which other programs used the same cores.
    A training that diverges ends there, with its best checkpoint kept; that is an outcome, not an error. So is one that
    goes to its end with a loss far above what it had been: gates that saturate keep every number finite.
    """
    optimizer = spec.optimizer.build(model.parameters())
    state = TrainState()
    done = checkpoint_steps(recorder.checkpoints)
    if done:
        state = load_checkpoint(recorder.checkpoints, done[-1], model, optimizer)
        _prune(recorder.checkpoints, state, spec)  # a kill may have come between the last checkpoint and this
    recorder.rewind(state.step)
    before = state.seconds, state.shared_seconds
    ending = ending_of(state, spec)
    if ending:
        return TrainingOutcome(state, ending, *before)
    gradients_of = accumulator(task, model, spec.label_smoothing, runtime, spec.normalization)
    stream = data.batches(seed, tokens=spec.batch_tokens, start=Cursor(*state.cursor))
    model.train()
    under_way: list[Update] = []
    clock, beside = native.clock(), shared()
    while True:
        pairs = list(itertools.islice(stream, spec.accumulate))
        _require_epochs(spec, state, pairs[-1][0])
        batches = [batch for _, batch in pairs]
        step = state.step + 1
        logs = step % spec.log_every == 0
        rate = spec.schedule.rate(step, width)
        set_rate(optimizer, rate)
        totals, tokens = gradients_of(batches)
        if spec.clip or logs:
            totals = torch.cat([totals, clip(model, spec.clip)[None].to(totals.dtype)])
        under_way.append(Update(step, tokens, runtime.fetch(totals)))
        failed, norm = _read(under_way, runtime.ahead(), state)
        if failed is not None:
            # weights that went on are spoilt all over: where it began can no longer be seen in them
            where = LOST
            if failed == step:
                lost = "the loss" if norm is None else "the norm of the gradient"
                where = _place(task, model, batches, spec, runtime) or lost
            return _diverged(failed, f"{where} is not finite", state, recorder, before)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        epoch_ends = pairs[-1][0][0] > state.cursor[0]
        state.step, state.cursor = step, tuple(pairs[-1][0])
        state.tokens += tokens
        validates = epoch_ends if spec.validate_every == "epoch" else step % spec.validate_every == 0
        if under_way and (logs or epoch_ends or validates or ending_of(state, spec)):
            failed, norm = _read(under_way, 0, state)
            if failed is not None:
                return _diverged(failed, f"{LOST} is not finite", state, recorder, before)
        now, noticed = native.clock(), shared()
        seconds, clock = now - clock, now
        state.seconds += seconds
        state.shared_seconds += noticed - beside
        beside = noticed
        for window in (state.window, state.passed):
            window.seconds += seconds
        if logs:
            recorder.log(_line(state, rate, norm, runtime))
            state.window = Window()
        passed = state.passed
        if epoch_ends:
            watch(state, passed)
            state.passed = Window()
        ending = ending_of(state, spec)
        if ending or validates:
            line = validate(task, model, data, spec, state, runtime, validator)
            if not math.isfinite(line["valid/loss"]):  # such weights are not kept
                where = _place(task, model, batches, spec, runtime)
                reason = "the validation loss is not finite" + (f", nor is the {where}" if where else "")
                return _diverged(step, reason, state, recorder, before)
            recorder.log(line)
            if epoch_ends and spec.validate_every == "epoch":
                bleu = train_bleu(task, model, data, spec, runtime, validator)
                recorder.log(epoch_line(passed, line, bleu))
            ending = ending_of(state, spec)
            save_checkpoint(recorder.checkpoints, model, optimizer, state)
            _prune(recorder.checkpoints, state, spec)
            clock, beside = native.clock(), shared()
        if ending:
            return TrainingOutcome(state, ending, *before)


def _read(under_way: list[Update], ahead: int, state: TrainState) -> tuple[int | None, float | None]:
    """Enter the numbers of all but the `ahead` newest updates, which are taken off the list.

    Returns the update that had one that is not finite, if any, and the norm of the last gradient read: None where it
    was not taken, or where the loss is not finite.
    """
    norm = None
    while len(under_way) > ahead:
        update = under_way.pop(0)
        loss, nll, *norms = update.numbers()
        norm = norms[0] if norms and math.isfinite(loss) else None
        if not all(map(math.isfinite, (loss, *norms))):
            return update.step, norm
        if update.step == 1:  # before anything was learnt: what comes far above it has come apart
            state.lowest = nll / max(1, update.tokens)
        for window in (state.window, state.passed):
            window.add(loss, nll, update.tokens)
    return None, norm


def _line(state: TrainState, rate: float, norm: float | None, runtime: Runtime) -> dict[str, Any]:
    window = state.window
    nll = window.nll / max(1, window.tokens)
    return {
        "step": state.step,
        "epoch": state.cursor[0],
        "elapsed_s": round(state.seconds, 3),
        "train/loss": window.loss / max(1, window.tokens),
        "train/nll": nll,
        "train/ppl": perplexity(window.nll, window.tokens),
        "train/lr": rate,
        "train/grad_norm": norm,
        "train/tokens": state.tokens,
        "train/tokens_per_s": window.tokens / max(window.seconds, 1e-9),
        "train/max_mem_mb": runtime.peak_memory_mb(),
    }


def _require_epochs(spec: TrainSpec, state: TrainState, cursor: Cursor) -> None:
    """Raise AttnbenchError before an update that would end two epochs at once, where the spec counts in them."""
    counts = spec.max_epochs is not None or spec.validate_every == "epoch"
    if counts and cursor[0] - state.cursor[0] > 1:
        raise AttnbenchError(
            f"train.accumulate: the {spec.accumulate} batches of update {state.step + 1} end two epochs of these data "
            "at least, so that none can be counted; lower it or train.batch_tokens, or give max_steps and "
            "validate_every in updates"
        )


def _prune(folder: Path, state: TrainState, spec: TrainSpec) -> None:
    steps = checkpoint_steps(folder)
    prune(folder, {*steps[-max(2, spec.average) :], state.best_step, state.step})


def _place(task: Task, model: nn.Module, batches: list[Any], spec: TrainSpec, runtime: Runtime) -> str | None:
    def forward() -> None:
        for batch in batches:
            with runtime.autocast():
                task.loss(model, batch, spec.label_smoothing)

    return first_nonfinite(model, forward)


def _diverged(
    step: int, seen: str, state: TrainState, recorder: Recorder, before: tuple[float, float]
) -> TrainingOutcome:
    epoch = epoch_of(state, step)
    text = f"diverged at step {step}, in epoch {epoch}: {seen}"
    recorder.log({"step": step, "event": text})
    return TrainingOutcome(state, Ending("diverged", step, epoch, text, seen), *before)
