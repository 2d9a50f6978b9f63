"""Gradients on a GPU from CUDA graphs: what it does for batches of one shape is recorded once, and played for each.

An update of a small model is some thousand short kernels, and a processor launches them more slowly than a GPU runs
them. A record is launched as a whole.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnbench.core import waiting
from attnbench.core.errors import AttnbenchError
from attnbench.core.tree import map_batch
from attnbench.tasks.base import Task
from attnbench.train.runtime import Runtime, waits
from attnbench.train.step import accumulate, gradients

log = logging.getLogger("attnbench")

SWITCH = "ATTNBENCH_GRAPHS"
"""Set to 0, no update is recorded."""
MOST = 256
"""Shapes that are recorded; batches of others are computed as they come."""

Accumulate = Callable[[list[Any]], tuple[Float[Tensor, "2"], int]]
"""`accumulate` of some batches."""


def records(runtime: Runtime) -> bool:
    """Whether updates are recorded there, of models that do not wait for the GPU."""
    return runtime.device.type == "cuda" and os.environ.get(SWITCH) != "0"


def accumulator(task: Task, model: nn.Module, smoothing: float, runtime: Runtime) -> Accumulate:
    """`accumulate` for the updates of one training, from records on a GPU, unless the model waits for it in an update.

    Its gradients are then the same tensors in every update.
    """
    if not records(runtime):
        return lambda batches: accumulate(task, model, batches, smoothing, runtime)
    return _Recorded(task, model, smoothing, runtime)


class _Graph(NamedTuple):
    """A record, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Any
    tokens: Tensor
    totals: Float[Tensor, "2"]

    def play(self, batch: Any, tokens: int) -> Float[Tensor, "2"]:
        for held, new in zip(_tensors(self.batch), _tensors(batch), strict=True):
            held.copy_(new.pin_memory(), non_blocking=True)
        self.tokens.fill_(tokens)
        self.graph.replay()
        return self.totals.clone()  # another record may write there


class _Recorded:
    """The first batch of a shape is computed as it comes, so that all is compiled and kept that is for such a shape;
    with the second it is recorded."""

    def __init__(self, task: Task, model: nn.Module, smoothing: float, runtime: Runtime) -> None:
        self._task, self._model, self._smoothing, self._runtime = task, model, smoothing, runtime
        self._pool: Any = None
        self._beside: Any = None
        self._met: set[Any] = set()
        self._graphs: dict[Any, _Graph] = {}
        self._slopes: dict[nn.Parameter, Tensor] = {}
        self._serves: bool | None = None

    def __call__(self, batches: list[Any]) -> tuple[Float[Tensor, "2"], int]:
        if self._serves is None:
            self._serves = not self._waits(batches[0])
        if not self._serves:
            return accumulate(self._task, self._model, batches, self._smoothing, self._runtime)
        tokens = sum(self._task.count(batch) for batch in batches)
        for parameter, slope in self._slopes.items():
            parameter.grad = slope
        if self._slopes:
            torch._foreach_zero_(list(self._slopes.values()))  # pyright: ignore[reportPrivateImportUsage]
        totals = [self._of(self._task.rounded(self._model, batch), tokens) for batch in batches]
        return torch.stack(totals).sum(0), tokens

    def _of(self, batch: Any, tokens: int) -> Float[Tensor, "2"]:
        shape = tuple(tensor.shape for tensor in _tensors(batch))
        if shape not in self._graphs:
            if shape not in self._met or len(self._graphs) >= MOST:
                self._met.add(shape)
                return self._computed(self._moved(batch), tokens)
            self._graphs[shape] = self._record(self._moved(batch))
        return self._graphs[shape].play(batch, tokens)

    def _computed(self, batch: Any, tokens: int | Tensor) -> Float[Tensor, "2"]:
        with waiting.forbid():
            totals = gradients(self._task, self._model, batch, tokens, self._smoothing, self._runtime)
        if not self._slopes:
            self._slopes = {each: each.grad for each in self._model.parameters() if each.grad is not None}
        return totals

    def _record(self, batch: Any) -> _Graph:
        tokens = torch.ones((), device=self._runtime.device)
        if self._pool is None:
            self._pool, self._beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with _recording(graph, self._pool, self._beside):
                totals = self._computed(batch, tokens)
        except RuntimeError as error:  # after it torch's generator may not be what it was
            raise AttnbenchError(
                f"this model's update cannot be recorded on the GPU ({str(error).splitlines()[0]}); "
                f"set {SWITCH}=0 in the environment and run again"
            ) from error
        return _Graph(graph, batch, tokens, totals)

    def _moved(self, batch: Any) -> Any:
        return map_batch(lambda tensor: tensor.to(self._runtime.device), batch)

    def _waits(self, batch: Any) -> bool:
        """Whether an update waits for the GPU, which a record cannot; the gradients are let go."""
        batch = self._moved(self._task.rounded(self._model, batch))

        def compute() -> None:
            with waiting.forbid():
                gradients(self._task, self._model, batch, 1, self._smoothing, self._runtime)

        compute()  # what is compiled and kept meanwhile may wait
        found = waits(compute)
        self._model.zero_grad(set_to_none=True)
        if found:
            log.info("updates of this model wait for the GPU, so that they are not recorded")
        return found


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any, beside: torch.cuda.Stream) -> Iterator[None]:
    """What torch.cuda.graph does, but for the memory that it gives back each time, which would be asked for again."""
    collects = gc.isenabled()
    gc.disable()  # what is let go meanwhile may be of CUDA, and not to be touched
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(beside):
            graph.capture_begin(pool=pool)
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_batch(lambda tensor: found.append(tensor) or tensor, tree)
    return found
