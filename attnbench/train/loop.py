"""The training loop: batch -> loss -> update -> log -> validate -> keep the best."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from attnbench.data.base import Cursor
from attnbench.search.base import Searcher
from attnbench.tasks.base import EVAL_TOKENS, Task
from attnbench.train.divergence import first_nonfinite
from attnbench.train.optim import set_rate
from attnbench.train.runtime import Runtime
from attnbench.train.spec import TrainSpec
from attnbench.train.state import TrainState, Window, checkpoint_steps, load_checkpoint, prune, save_checkpoint
from attnbench.train.step import accumulate, clip

RISE = math.log(10)
"""Nats a token that the training loss of an epoch lies above the least one when training has come apart: what is
learnt was ten times as likely. Dropout, noise and overfitting do not do that to the loss of whole epochs."""

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


class Ending(NamedTuple):
    """Why a training ended, at which update and in which pass over the data, both counted from 1.

    The log counts passes otherwise: the `epoch` of its lines says how many are done. text: one line for the table.
    seen: of a divergence, what was not finite, or that the loss rose and stayed high; the step is then where it had.
    """

    kind: Literal["finished", "stopped_early", "diverged"]
    step: int
    epoch: int
    text: str
    seen: str = ""


class Update(NamedTuple):
    """One whose numbers may be on their way from the device: summed loss and nll, the gradient's norm if taken."""

    step: int
    tokens: int
    numbers: Callable[[], list[float]]


class Outcome(NamedTuple):
    """Where a training stood when it ended. resumed_seconds: training time that lies before this call."""

    state: TrainState
    ending: Ending
    resumed_seconds: float = 0.0

    @property
    def diverged(self) -> bool:
        """A number stopped being one."""
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
) -> Outcome:
    """Train from the newest checkpoint, or from the start, to the end that the spec names.

    Bit-equal on a processor however often it is cut off and called again: everything the next update depends on is
    in the checkpoint. width: the model's D, which Noam's rule reads. validator: decodes at validations, if they do.
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
    before = state.seconds
    ending = _ending(state, spec)
    if ending:
        return Outcome(state, ending, before)
    stream = data.batches(seed, tokens=spec.batch_tokens, start=Cursor(*state.cursor))
    model.train()
    under_way: list[Update] = []
    clock = time.perf_counter()
    while True:
        pairs = list(itertools.islice(stream, spec.accumulate))
        batches = [batch for _, batch in pairs]
        step = state.step + 1
        logs = step % spec.log_every == 0
        rate = spec.schedule.rate(step, width)
        set_rate(optimizer, rate)
        totals, tokens = accumulate(task, model, batches, spec.label_smoothing, runtime)
        if spec.clip or logs:
            totals = torch.cat([totals, clip(model, spec.clip)[None].to(totals.dtype)])
        under_way.append(Update(step, tokens, runtime.fetch(totals)))
        failed, norm = _read(under_way, runtime.ahead(), state)
        if failed is not None:
            # weights that went on are spoilt all over: where it began can no longer be seen in them
            where = _place(task, model, batches, spec, runtime) or "the loss" if failed == step else LOST
            return _diverged(failed, f"{where} is not finite", state, recorder, before)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        epoch_ends = pairs[-1][0][0] > state.cursor[0]
        state.step, state.cursor = step, tuple(pairs[-1][0])
        state.tokens += tokens
        validates = epoch_ends if spec.validate_every == "epoch" else step % spec.validate_every == 0
        if under_way and (logs or epoch_ends or validates or _end(state, spec)):
            failed, norm = _read(under_way, 0, state)
            if failed is not None:
                return _diverged(failed, f"{LOST} is not finite", state, recorder, before)
        seconds, clock = time.perf_counter() - clock, time.perf_counter()
        state.seconds += seconds
        for window in (state.window, state.passed):
            window.seconds += seconds
        if logs:
            recorder.log(_line(state, rate, norm, runtime))
            state.window = Window()
        passed = state.passed
        if epoch_ends:
            _watch(state, passed)
            state.passed = Window()
        ending = _ending(state, spec)
        if ending or validates:
            line = _validate(task, model, data, spec, state, runtime, validator)
            if not math.isfinite(line["valid/loss"]):  # such weights are not kept
                where = _place(task, model, batches, spec, runtime)
                reason = "the validation loss is not finite" + (f", nor is the {where}" if where else "")
                return _diverged(step, reason, state, recorder, before)
            recorder.log(line)
            if epoch_ends and spec.validate_every == "epoch":
                bleu = _train_bleu(task, model, data, spec, runtime, validator)
                recorder.log(_epoch_line(passed, line, bleu))
            ending = _ending(state, spec)
            save_checkpoint(recorder.checkpoints, model, optimizer, state)
            _prune(recorder.checkpoints, state, spec)
            clock = time.perf_counter()
        if ending:
            return Outcome(state, ending, before)


def _read(under_way: list[Update], ahead: int, state: TrainState) -> tuple[int | None, float | None]:
    """Enter the numbers of all but the `ahead` newest updates, which are taken off the list.

    Returns the update that had one that is not finite, if any, and the norm of the last gradient read.
    """
    norm = None
    while len(under_way) > ahead:
        update = under_way.pop(0)
        loss, nll, *norms = update.numbers()
        if not all(map(math.isfinite, (loss, *norms))):
            return update.step, None
        norm = norms[0] if norms else None
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
        "train/ppl": math.exp(min(nll, 700.0)),
        "train/lr": rate,
        "train/grad_norm": norm,
        "train/tokens": state.tokens,
        "train/tokens_per_s": window.tokens / max(window.seconds, 1e-9),
        "train/max_mem_mb": runtime.peak_memory_mb(),
    }


def _validate(
    task: Task,
    model: nn.Module,
    data: Any,
    spec: TrainSpec,
    state: TrainState,
    runtime: Runtime,
    validator: Searcher | None,
) -> dict[str, Any]:
    """Score the validation split, note a new best in `state`, and return the line of the log."""
    started = time.perf_counter()
    tokens = _eval_tokens(spec)
    model.eval()
    with torch.no_grad(), runtime.autocast():
        values = task.validate(model, data, "valid", tokens)
        if validator is not None and math.isfinite(values["loss"]):
            values["bleu"] = task.evaluate(model, data, "valid", validator, tokens, brief=True).values["bleu"]
    model.train()
    value = -values["loss"] if spec.select == "loss" else values.get("bleu", math.nan)
    state.least = values["loss"] if state.least is None else min(state.least, values["loss"])
    # BLEU without smoothing is 0 for a while; until it moves, the newest weights are the best and none is stale,
    # but for those of a training that has diverged
    level = spec.select == "bleu" and value == state.best == 0 and values["loss"] <= state.least + RISE
    if math.isfinite(value) and (state.best is None or value > state.best or level):
        state.best, state.best_step, state.stale = value, state.step, 0
    else:
        state.stale += 1
    line: dict[str, Any] = {"step": state.step, "epoch": state.cursor[0], "elapsed_s": round(state.seconds, 3)}
    line |= {f"valid/{name}": number for name, number in values.items()}
    line["valid/seconds"] = time.perf_counter() - started
    return line


def _train_bleu(
    task: Task, model: nn.Module, data: Any, spec: TrainSpec, runtime: Runtime, validator: Searcher | None
) -> dict[str, float]:
    if not spec.train_bleu or validator is None:
        return {}
    model.eval()
    with torch.no_grad(), runtime.autocast():
        bleu = task.sample_bleu(model, data, validator, _eval_tokens(spec), spec.train_bleu)
    model.train()
    return {"epoch/train_bleu": bleu}


def _eval_tokens(spec: TrainSpec) -> int:
    """Small batches suit training, not decoding: of 512 tokens it takes twice as long as of 4,096."""
    return max(spec.batch_tokens, EVAL_TOKENS)


def _epoch_line(passed: Window, validated: Mapping[str, Any], bleu: Mapping[str, float]) -> dict[str, Any]:
    """A point of the curves: `epoch` passes are done. Losses without smoothing; that of training is met with dropout.

    epoch/seconds: of training alone, its data included.
    """
    nll = passed.nll / max(1, passed.tokens)
    line: dict[str, Any] = {name: validated[name] for name in ("step", "epoch", "elapsed_s")}
    line |= {"epoch/train_loss": nll, "epoch/train_ppl": math.exp(min(nll, 700.0)), **bleu}
    line |= {name.replace("valid/", "epoch/valid_"): validated[name] for name in validated if name.startswith("valid/")}
    return {**line, "epoch/tokens": passed.tokens, "epoch/seconds": passed.seconds}


def _watch(state: TrainState, passed: Window) -> None:
    """Note whether the loss of an epoch that is done lies far above the least one so far."""
    nll = passed.nll / max(1, passed.tokens)
    state.lowest = nll if state.lowest is None else min(state.lowest, nll)
    if nll <= state.lowest + RISE:
        state.risen = None
    else:
        first = state.risen[:2] if state.risen else (state.step, state.cursor[0])
        state.risen = (*first, nll)


def _ending(state: TrainState, spec: TrainSpec) -> Ending | None:
    ending = _end(state, spec)
    if ending is None or state.risen is None:
        return ending
    step, epoch, nll = state.risen
    seen = f"the training loss rose from {state.lowest:.3g} to {nll:.3g} nats a token and stayed there"
    return Ending("diverged", step, epoch, f"diverged by step {step}, in epoch {epoch}: {seen}", seen)


def _end(state: TrainState, spec: TrainSpec) -> Ending | None:
    step, epoch = state.step, _epoch(state, state.step)
    if step >= spec.max_steps:
        return Ending("finished", step, epoch, f"finished at step {step}")
    if spec.max_epochs is not None and state.cursor[0] >= spec.max_epochs:
        return Ending("finished", step, epoch, f"finished after {spec.max_epochs} epochs, at step {step}")
    if spec.patience is not None and state.stale >= spec.patience:
        text = f"stopped early at step {step}: no better for {state.stale} validations"
        return Ending("stopped_early", step, epoch, text)
    return None


def _epoch(state: TrainState, step: int) -> int:
    """The pass over the data that an update belongs to, from 1: the last one made, or the one after it."""
    done, *within = state.cursor
    return done + (step > state.step or any(within))


def _prune(folder: Path, state: TrainState, spec: TrainSpec) -> None:
    steps = checkpoint_steps(folder)
    prune(folder, {*steps[-max(2, spec.average) :], state.best_step, state.step})


def _place(task: Task, model: nn.Module, batches: list[Any], spec: TrainSpec, runtime: Runtime) -> str | None:
    def forward() -> None:
        for batch in batches:
            with runtime.autocast():
                task.loss(model, batch, spec.label_smoothing)

    return first_nonfinite(model, forward)


def _diverged(step: int, seen: str, state: TrainState, recorder: Recorder, before: float) -> Outcome:
    epoch = _epoch(state, step)
    text = f"diverged at step {step}, in epoch {epoch}: {seen}"
    recorder.log({"step": step, "event": text})
    return Outcome(state, Ending("diverged", step, epoch, text, seen), before)
