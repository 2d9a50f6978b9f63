"""How fast a model trains: some updates, of which nothing stays."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attnbench.data.base import Cursor
from attnbench.tasks.base import Task
from attnbench.train.recorded import accumulator, records
from attnbench.train.runtime import Runtime
from attnbench.train.spec import TrainSpec
from attnbench.train.state import TrainState
from attnbench.train.step import clip

_WARM = 3
"""Times that every update is made before the clock starts: memory is taken, code compiled; the third records it."""
_RECORDED = 4
"""Updates that are made again and again where they are recorded: of ever new ones, few would be played."""


def pace(
    task: Task, model: nn.Module, data: Any, spec: TrainSpec, *, seed: int, runtime: Runtime,
    begin: Callable[[], object], seconds: float,
) -> float:  # fmt: skip
    """Target tokens a second, over so many seconds at least, in the updates with which a training of that seed begins,
    at a learning rate of 0; on a GPU that records them in the first ones alone. begin: called when all is warm, before
    the clock starts."""
    optimizer = spec.optimizer.build(model.parameters())
    gradients_of = accumulator(task, model, spec.label_smoothing, runtime, spec.normalization)
    stream = data.batches(seed, tokens=spec.batch_tokens, start=Cursor(*TrainState().cursor))
    given = ([batch for _, batch in itertools.islice(stream, spec.accumulate)] for _ in itertools.count())
    warm = _WARM
    if records(runtime):
        given, warm = itertools.cycle(list(itertools.islice(given, _RECORDED))), _WARM * _RECORDED
    under_way: list[Callable[[], list[float]]] = []
    model.train()

    def update() -> int:
        totals, tokens = gradients_of(next(given))
        if spec.clip:
            totals = torch.cat([totals, clip(model, spec.clip)[None].to(totals.dtype)])
        under_way.append(runtime.fetch(totals))
        while len(under_way) > runtime.ahead():
            under_way.pop(0)()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return tokens

    for _ in range(warm):
        update()
    runtime.synchronize()
    begin()
    started, done = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        done += update()
    runtime.synchronize()
    return done / (time.perf_counter() - started)
