"""Interleaved timing: every case has its turn in every round, so that what else the machine does meets all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from attnbench.core.errors import AttnbenchError

TOLERANCE = 1e-3
"""Most by which a case may differ from its definition, in float32, to be timed; half precisions have ten times it, and
so has a case in 8 bits, or in bfloat16 among others in float32."""


_WAITS = ("synchronizing", "capturing")
"""What torch says of a call that waits for the GPU."""


class Case(NamedTuple):
    """One thing to time. group: what it is compared within ("64x4x32x32, forward"); name: what it is called there.

    work: what one call does, in the unit of its section (tokens; 1 where calls are counted). check: gives the largest
    difference from the definition. cost: what a call does, in the unit of the yardstick, or cannot do without where
    that is known; asked for after the first call. coarse: it rounds to 8 bits, where a last digit of float32 decides
    between steps, or to bfloat16. settle: calls after the first that are not timed either.
    """

    group: str
    name: str
    run: Callable[[], object]
    work: float = 1.0
    check: Callable[[], float] | None = None
    cost: Callable[[], float] | None = None
    coarse: bool = False
    settle: int = 0


class Yardstick(NamedTuple):
    """What the machine does at its best, timed in every round beside the cases: `cost` in a call, of operations of
    matrix products or of bytes that are read and written."""

    run: Callable[[], object]
    cost: float


class Timing(NamedTuple):
    """Seconds a call: median, least and most over the rounds. first: of the first call, which may compile.

    error: the largest difference from the definition; None where there is none to compare with. share: the part of the
    yardstick's rate that its cost is done at, the median of the rounds. pace: work done while the yardstick does a unit
    of its own, by the least times; what a call costs is no part of it. peak_mb: most memory taken, where that was
    measured. rounds: the seconds of each round, which cases that are timed together share.
    """

    group: str
    name: str
    median: float
    low: float
    high: float
    first: float
    work: float
    error: float | None
    share: float | None = None
    pace: float | None = None
    peak_mb: float | None = None
    rounds: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Work a second."""
        return self.work / self.median


def measure(
    cases: Sequence[Case], *, rounds: int, chunk: float, device: torch.device, loose: bool = False, rest: float = 0,
    replay: bool = False, yardstick: Yardstick | None = None,
) -> list[Timing]:  # fmt: skip
    """Time the cases in turns, after a first call of each and its check. chunk: seconds that the calls of one turn take
    together, at least one call. rest: seconds before each turn, in which threads of the case before go to sleep.
    replay: on a GPU, time what it does, without the host's part: each case is recorded once, and its record run again;
    one that waits for the GPU is timed as it is called, and its name says so. yardstick: has its turn, too, and shares
    are of its rate.

    Raises AttnbenchError for a case that does not give what its definition gives: none of these is timed then.
    """
    firsts = [seconds(case.run, 1, device) for case in cases]
    for case in cases:
        for _ in range(case.settle):
            case.run()
    errors = [None if case.check is None else case.check() for case in cases]
    for case, error in zip(cases, errors, strict=True):
        limit = TOLERANCE * (10 if loose or case.coarse else 1)
        if error is not None and not error <= limit:
            raise AttnbenchError(
                f"{case.name} ({case.group}) lies {error:.1e} from its definition, and {limit:.0e} is allowed, so that "
                "none that stands beside it was timed; please report it; where --only, --against or --axis can leave "
                "it out, the others are timed meanwhile"
            )
    costs = [None if case.cost is None or yardstick is None else case.cost() for case in cases]
    if yardstick is not None:
        yardstick.run()
        cases = [*cases, Case("", "", yardstick.run)]
    if replay and device.type == "cuda":
        torch.cuda.empty_cache()
        pool = torch.cuda.graph_pool_handle()  # one for all: no record's result is looked at
        cases = [_alone(case, pool) for case in cases]
    calls = [max(1, min(5000, int(chunk / max(seconds(case.run, 1, device), 1e-7)))) for case in cases]
    taken: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds):
        for at in _order(len(cases), turn):
            time.sleep(rest)
            taken[at].append(seconds(cases[at].run, calls[at], device))
    best = None if yardstick is None else [each / yardstick.cost for each in taken.pop()]
    return [
        Timing(
            case.group, case.name, statistics.median(each), min(each), max(each), first, case.work, error,
            None if cost is None or best is None else _share(cost, each, best),
            None if best is None else case.work * min(best) / min(each),
            rounds=tuple(each),
        )
        for case, each, first, error, cost in zip(cases[: len(taken)], taken, firsts, errors, costs, strict=True)
    ]  # fmt: skip


def _order(count: int, turn: int) -> list[int]:
    """Each of so many once, in steps that are others from turn to turn: what one leaves behind meets many others."""
    steps = [step for step in range(1, count + 1) if math.gcd(step, count) == 1]
    step = steps[turn % len(steps)]
    return [(turn + place * step) % count for place in range(count)]


def _share(cost: float, taken: Sequence[float], best: Sequence[float]) -> float:
    """best: seconds that the yardstick took for a unit of cost, in each round."""
    return statistics.median(cost * unit / own for own, unit in zip(taken, best, strict=True))


def _alone(case: Case, pool: Any) -> Case:
    try:
        return case._replace(run=recorded(case.run, pool))
    except RuntimeError as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or not any(word in str(error) for word in _WAITS):
            raise
        torch.cuda.synchronize()
        return case._replace(name=f"{case.name}, as called")


def recorded(run: Callable[[], object], pool: Any) -> Callable[[], object]:
    """What a call does on the GPU, as a CUDA graph to run again. pool: of memory, of torch.cuda.graph_pool_handle.

    Raises RuntimeError for a call that waits for the GPU.
    """
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run()
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph.replay


def seconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Seconds a call, on the clock of the device."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - started) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / calls
