"""How long decoding takes: a split decoded several times, its batches on the device before the clock starts."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field

from attnbench.core.errors import AttnbenchError
from attnbench.core.memory import is_full
from attnbench.core.spec import Spec
from attnbench.core.tree import map_batch
from attnbench.search.base import Hypothesis, Searcher, computing
from attnbench.tasks.base import Metrics, Task
from attnbench.tasks.sources import source_of
from attnbench.train.runtime import Runtime


class TimingSpec(Spec):
    """How decoding is timed, with the search of the cell and the weights that were scored."""

    decode_runs: int = Field(ge=1)
    """Times that the split is decoded; one more, that of its longest batch, goes before and is not counted."""
    split: Literal["valid", "test"] = "valid"
    """What is decoded."""
    sentences: int | None = Field(default=None, ge=1)
    """Sentences decoded at a time, of like lengths; left out: as many as make 4,096 padded tokens a side."""
    full_length: bool = False
    """Every output goes on to the length limit of the search, past EOS: the time then depends on no training. With
    search.max_ratio 1 and max_extra 0 an output is as long as its source with EOS."""


def time_decoding(
    task: Task, model: Any, data: Any, spec: TimingSpec, searcher: Searcher, runtime: Runtime, tokens: int
) -> Metrics:
    """Seconds of one decoding of the split: `seconds`, their mean; `seconds_spread`, their sample standard deviation.

    encode_seconds: the part of the encoder, timed alone, with what attention makes of the source once. steps: that the
    decoder takes, all batches together; a beam may look further than its best output. ms_per_step: of what is left
    without the encoder. Loading data, building the model, packing its weights and turning ids into text are no
    part of them.

    Raises AttnbenchError where a GPU's memory is too small for as many sentences at once.
    """
    most = tokens if spec.sentences is None else sys.maxsize
    batches = [
        map_batch(lambda tensor: tensor.to(runtime.device), batch)
        for batch in data.eval_batches(spec.split, tokens=most, rows=spec.sentences)
    ]
    decoded: dict[int, Hypothesis] = {}
    stepped = _Stepped(model)

    def decode() -> None:
        decoded.update(task.decode(stepped, batches, searcher, to_limit=spec.full_length))

    @torch.no_grad()
    def encode() -> None:
        for batch in batches:
            model.encode(source_of(batch))

    try:
        with computing(model, searcher.spec):
            task.decode(model, batches[-1:], searcher, to_limit=spec.full_length)
            seconds = [_clocked(decode, runtime) for _ in range(spec.decode_runs)]
            encoding = statistics.fmean(_clocked(encode, runtime) for _ in range(spec.decode_runs))
    except RuntimeError as error:
        if not is_full(error):
            raise
        largest = max(len(batch.index) for batch in batches)
        raise AttnbenchError(
            f"the GPU's memory is too small to time the decoding of {largest} sentences at once; give "
            f"timing.sentences, say {max(1, largest // 4)}, or leave timing out"
        ) from None
    steps = stepped.steps // spec.decode_runs
    mean = statistics.fmean(seconds)
    values = {
        "seconds": mean,
        "encode_seconds": encoding,
        "steps": steps,
        "ms_per_step": 1000 * (mean - encoding) / max(1, steps),
        "runs": spec.decode_runs,
    }
    if len(seconds) > 1:
        values["seconds_spread"] = statistics.stdev(seconds)
    return Metrics(values, {}, {"sentences": len(decoded)}, {})


class _Stepped:
    """A model that counts its decoder steps."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.steps = 0

    def step(self, *given: Any) -> Any:
        self.steps += 1
        return self._model.step(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _clocked(work: Callable[[], None], runtime: Runtime) -> float:
    runtime.synchronize()
    started = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - started
