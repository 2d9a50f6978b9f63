"""Gradients on a GPU from CUDA graphs: what it does for batches of one shape is recorded once, and played for each.

An update of a small model is some thousand short kernels, and a processor launches them more slowly than a GPU runs
them. A record is launched as a whole.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnbench.core import waiting
from attnbench.core.errors import AttnbenchError, first_line
from attnbench.core.memory import is_full
from attnbench.core.tree import map_batch
from attnbench.tasks.base import Task
from attnbench.train.runtime import Runtime, waits
from attnbench.train.step import Normalization, accumulate, gradients, targets

log = logging.getLogger("attnbench")

SWITCH = "ATTNBENCH_GRAPHS"
"""Set to 0, no update is recorded."""
MOST = 256
"""Shapes that are recorded; batches of others are computed as they come."""

Accumulate = Callable[[list[Any]], tuple[Float[Tensor, "2"], int]]
"""`accumulate` of some batches."""


class Tape(Protocol):
    """What records: the GPU, or a stand-in."""

    def waits(self, run: Callable[[], object], *, watched: bool) -> bool:
        """Whether a call waits for the device, and ends where it would. watched: False asks only whether it says so
        itself."""
        ...

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """The call as one that can be played, and what it returns, which each play writes anew; nothing is done yet."""
        ...


def records(runtime: Runtime) -> bool:
    """Whether updates are recorded there, of models that do not wait for the GPU."""
    return runtime.device.type == "cuda" and os.environ.get(SWITCH) != "0"


def accumulator(
    task: Task, model: nn.Module, smoothing: float, runtime: Runtime, normalization: Normalization = "tokens",
    pool: Any = None,
) -> Accumulate:  # fmt: skip
    """`accumulate` for the updates of one training, from records on a GPU, unless the model waits for it in an update.

    Its gradients are then the same tensors in every update. pool: of memory, that records of other models may share,
    which are never played at the same time.
    """
    if not records(runtime):
        return lambda batches: accumulate(task, model, batches, smoothing, runtime, normalization)
    return Recorded(task, model, smoothing, runtime, GpuTape(runtime.device, pool), normalization)


class _Record(NamedTuple):
    """What can be played, and the tensors that it reads and writes."""

    play: Callable[[], object]
    batch: Any
    by: Tensor
    totals: Float[Tensor, "2"]


class _WaitsError(Exception):
    """A batch of a shape that is computed otherwise from now on."""


class Recorded:
    """Gradients of batches whose shapes come again and again.

    The first batch of a shape is computed as usual, which compiles code and fills caches for it; so is the second,
    which also checks whether anything waits for the GPU; the third is recorded. A shape that waits, or for whose record
    there is no memory, is always computed.
    """

    def __init__(
        self, task: Task, model: nn.Module, smoothing: float, runtime: Runtime, tape: Tape,
        normalization: Normalization = "tokens",
    ) -> None:  # fmt: skip
        self._task, self._model, self._smoothing, self._runtime = task, model, smoothing, runtime
        self._normalization: Normalization = normalization
        self._tape: Tape | None = tape
        self._met: dict[Any, int] = {}
        self._plain: set[Any] = set()
        self._records: dict[Any, _Record] = {}
        self._slopes: dict[nn.Parameter, Tensor] = {}

    def __call__(self, batches: list[Any]) -> tuple[Float[Tensor, "2"], int]:
        tokens = targets(self._task, batches, "tokens")
        by = tokens if self._normalization == "tokens" else targets(self._task, batches, self._normalization)
        while self._tape is not None:
            full = False
            self._begin()
            try:
                totals = [self._of(self._task.rounded(self._model, batch), by) for batch in batches]
            except _WaitsError:
                self._adopt()  # what was computed so far is let go
            except RuntimeError as error:
                if not (is_full(error) and self._records):
                    raise
                full = True
            else:
                self._adopt()
                return torch.stack(totals).sum(0), tokens
            if full:  # outside of the handler, which holds what was computed
                self._stop("the GPU's memory is full, so that updates are not recorded from here on")
        self._begin()
        return accumulate(self._task, self._model, batches, self._smoothing, self._runtime, self._normalization)

    def _begin(self) -> None:
        """Gradients of 0, in the tensors that records add to."""
        for parameter, slope in self._slopes.items():
            parameter.grad = slope
        if self._slopes:
            torch._foreach_zero_(list(self._slopes.values()))  # pyright: ignore[reportPrivateImportUsage]

    def _adopt(self) -> None:
        """Gradients that came up are those of all updates from now on."""
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                self._slopes.setdefault(parameter, parameter.grad)

    def _stop(self, why: str) -> None:
        log.warning(why)
        self._adopt()
        self._tape = None
        self._records.clear()
        torch.cuda.empty_cache()

    def _of(self, batch: Any, by: int) -> Float[Tensor, "2"]:
        shape = tuple(tensor.shape for tensor in _tensors(batch))
        if shape not in self._records and shape not in self._plain:
            self._met[shape] = self._met.get(shape, 0) + 1
            if self._met[shape] < 3:
                return self._tried(shape, batch, by)
            self._record(shape, batch)
        if shape in self._records:
            return _played(self._records[shape], batch, by)
        return self._computed(self._moved(batch), by)

    def _tried(self, shape: Any, batch: Any, by: int) -> Float[Tensor, "2"]:
        """As it will be recorded, and the second time on the watch. Raises _WaitsError where it waits for the GPU."""
        held, found = self._moved(batch), []

        def run() -> None:
            with waiting.forbid():
                found.append(self._computed(held, by))

        assert self._tape is not None  # or nothing would be tried
        if not self._tape.waits(run, watched=self._met[shape] > 1):
            return found[0]
        self._plain.add(shape)
        if not self._records and len(self._plain) == 1:
            log.info("updates of this model wait for the GPU, so that they are not recorded")
            self._tape = None
        raise _WaitsError

    def _record(self, shape: Any, batch: Any) -> None:
        """Unless there are records enough, or there is no memory for more."""
        held, by = self._moved(batch), torch.ones((), device=self._runtime.device)

        def run() -> Tensor:
            with waiting.forbid():
                return self._computed(held, by)

        self._plain.add(shape)
        if len(self._records) >= MOST or self._tape is None:
            return
        try:
            play, totals = self._tape.record(run)
        except RuntimeError as error:
            if is_full(error):
                return
            raise AttnbenchError(
                f"this model's update cannot be recorded on the GPU ({first_line(error)}); set {SWITCH}=0 in the "
                "environment and run again"
            ) from error
        self._plain.remove(shape)
        self._records[shape] = _Record(play, held, by, totals)

    def _computed(self, batch: Any, by: int | Tensor) -> Float[Tensor, "2"]:
        return gradients(self._task, self._model, batch, by, self._smoothing, self._runtime)

    def _moved(self, batch: Any) -> Any:
        return map_batch(lambda tensor: tensor.to(self._runtime.device, copy=True), batch)


def _played(record: _Record, batch: Any, by: int) -> Float[Tensor, "2"]:
    for held, new in zip(_tensors(record.batch), _tensors(batch), strict=True):
        held.copy_(new.pin_memory() if held.is_cuda else new, non_blocking=True)
    record.by.fill_(by)
    record.play()
    return record.totals.clone()  # another record may write there


class GpuTape:
    """A Tape of CUDA graphs on one device. pool: of memory; a new one where it is None."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        _settle_checkpoints()
        self._device, self._pool = device, pool
        self._beside: torch.cuda.Stream | None = None

    def waits(self, run: Callable[[], object], *, watched: bool) -> bool:
        return waits(run, watched=watched)

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        if self._beside is None:
            self._beside = _beside(self._device)
            self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
            gc.collect()  # a gradient's way back that is left in a cycle would lead to the stream that it was made on
            torch.cuda.empty_cache()  # a record takes nothing of the memory that is kept for other work
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with _capturing(graph, self._pool, self._beside):
            found = run()
        found.fill_(torch.nan)  # which a record that does nothing would leave there
        return graph.replay, found


@functools.cache
def _settle_checkpoints() -> None:
    """Make a process's first use of torch's checkpoint, which leaves the way back of all gradients in a cycle."""
    with torch.enable_grad():
        result: Any = checkpoint(torch.neg, torch.ones((), requires_grad=True), use_reentrant=False)
    result.backward()


@functools.cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """The stream of all records on a GPU: memory for products is kept for each stream there is."""
    return torch.cuda.Stream(device)


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, beside: torch.cuda.Stream) -> Iterator[None]:
    """What torch.cuda.graph does, but for the memory that it gives back each time, which would be asked for again."""
    collects = gc.isenabled()
    gc.disable()  # what is let go meanwhile may be of CUDA, and not to be touched
    try:
        with torch.cuda.stream(beside):
            graph.capture_begin(pool=pool)
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # which would say less than what was raised
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_batch(lambda tensor: found.append(tensor) or tensor, tree)
    return found
