"""Scores on the way: the validation split, and the points of the curves."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from attnbench.metrics.likelihood import perplexity
from attnbench.search.base import Searcher
from attnbench.tasks.base import EVAL_TOKENS, Task
from attnbench.train.ending import RISE
from attnbench.train.runtime import Runtime
from attnbench.train.spec import TrainSpec
from attnbench.train.state import TrainState, Window


def validate(
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
    state.newest = values["loss"]
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


def train_bleu(
    task: Task, model: nn.Module, data: Any, spec: TrainSpec, runtime: Runtime, validator: Searcher | None
) -> dict[str, float]:
    """`epoch/train_bleu`, of so many training sentences as the spec asks for; nothing where it asks for none."""
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


def epoch_line(passed: Window, validated: Mapping[str, Any], bleu: Mapping[str, float]) -> dict[str, Any]:
    """A point of the curves: `epoch` passes are done. Losses without smoothing; that of training is met with dropout.

    epoch/seconds: of training alone, its data included.
    """
    nll = passed.nll / max(1, passed.tokens)
    line: dict[str, Any] = {name: validated[name] for name in ("step", "epoch", "elapsed_s")}
    line |= {"epoch/train_loss": nll, "epoch/train_ppl": perplexity(passed.nll, passed.tokens), **bleu}
    line |= {name.replace("valid/", "epoch/valid_"): validated[name] for name in validated if name.startswith("valid/")}
    return {**line, "epoch/tokens": passed.tokens, "epoch/seconds": passed.seconds}
