"""How many cells at a time get most done on this machine: one of them is trained for some seconds, alone and several
times at once, and nothing of it stays."""

from __future__ import annotations

import logging
import multiprocessing
import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attnbench.core import measured
from attnbench.core.contention import relieved
from attnbench.core.errors import AttnbenchError, first_line
from attnbench.core.processor import usable_cores
from attnbench.core.seeding import derive, seed_everything
from attnbench.experiment.executor import settle
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import Place, build_model, require_prepared, set_up
from attnbench.experiment.sharing import training_digest
from attnbench.train.pace import pace
from attnbench.train.runtime import choose_device

log = logging.getLogger("attnbench")

_SECONDS = 5.0
"""Of each rehearsal, once all are warm."""
_PATIENCE = 600.0
"""Seconds in which all have to be done, compiling and warming up included."""
_CLEARLY = 1.05
"""Times the progress of fewer cells that more of them have to make."""
_SHARED = 0.1
"""Part of its seconds from which on what other programs took makes a rehearsal worth nothing later on."""


class Rehearsal(NamedTuple):
    """rate: target tokens a second of all. shared: seconds that other programs took of one. fault: why one failed."""

    rate: float = 0.0
    shared: float = 0.0
    fault: str | None = None


class _UnsureError(AttnbenchError):
    """The best that is known for now, which is not to be kept."""

    def __init__(self, jobs: int, why: str) -> None:
        super().__init__(why)
        self.jobs = jobs


def jobs_that_pay(
    table: Sequence[Cell], pending: Sequence[Cell], place: Place, devices: Sequence[str], *, fresh: bool
) -> int:
    """How many of the pending cells, whose data are prepared, to train at a time: of one, two, four and so on, up to
    the cores, or to four on a GPU, as many as make clearly more target tokens a second than half of them.

    Measured once for this machine and table, whichever of its cells are left, and kept: what is resumed goes on with
    the same threads. Not kept where other programs had a part, or more at a time failed. Cells of one training are one,
    unless all begin afresh. One where decoding is timed, which others beside it would spoil. devices: GPUs that they
    share out among themselves.
    """
    most = len(pending) if fresh else len({training_digest(cell.spec) for cell in pending})
    if most < 2:
        return 1
    if any(cell.spec.timing for cell in pending):
        log.info("--jobs auto: one cell at a time, for decoding is timed")
        return 1
    counts = _counts(len(table), place, devices)
    if len(counts) == 1:
        return min(most, counts[0])
    name = "|".join([training_digest(table[0].spec.replace(seed=0)), *map(str, counts), _machine(place)])
    known = measured.kept("jobs", "jobs", of=name)
    try:
        jobs = measured.once("jobs", "jobs", lambda: float(_best(pending[0], place, devices, counts)), of=name)
        jobs, kept = int(jobs or counts[0]), "kept in the cache" if jobs else "not kept"
    except _UnsureError as error:
        jobs, kept = error.jobs, f"for this time: {error}"
    log.info("--jobs auto: %d at a time (%s)", min(most, jobs), kept if known is None else "as was measured before")
    return min(most, jobs)


def _machine(place: Place) -> str:
    """What beside the processor decides."""
    device = choose_device(place.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _counts(cells: int, place: Place, devices: Sequence[str]) -> list[int]:
    least = max(1, len(devices))
    most = 4 * least if devices or choose_device(place.device).type != "cpu" else usable_cores()
    return [least << times for times in range(10) if not times or least << times <= min(most, cells)]


def _best(cell: Cell, place: Place, devices: Sequence[str], counts: Sequence[int]) -> int:
    log.info("--jobs auto: '%s' is trained for some seconds, %s at a time", cell.label, ", ".join(map(str, counts)))
    best, fastest, alone, unsure = counts[0], 0.0, 0.0, ""
    for count in counts:
        found = _together(cell, count, place, devices)
        if found.fault is not None:
            raise _UnsureError(best, f"with {count} at a time {found.fault}")
        if found.shared > _SHARED * _SECONDS:
            unsure = "other programs use the same processor cores"
        alone = alone or found.rate
        log.info("--jobs auto: %d at a time make %.0f target tokens a second, %.2f times those of %d",
                 count, found.rate, found.rate / alone, counts[0])  # fmt: skip
        if found.rate <= _CLEARLY * fastest:
            break
        best, fastest = count, found.rate
    if unsure:
        raise _UnsureError(best, unsure)
    return best


def _together(cell: Cell, count: int, place: Place, devices: Sequence[str]) -> Rehearsal:
    context = multiprocessing.get_context("spawn")
    threads, level = max(1, usable_cores() // count), log.getEffectiveLevel()
    processes: list[Any] = []
    found: list[Rehearsal] = []
    end = time.monotonic() + _PATIENCE
    try:
        ready, results = context.Barrier(count), context.Queue()
        for index in range(count):
            device = devices[index % len(devices)] if devices else place.device
            own = replace(place, device=device, threads=threads, jobs=count)
            process = context.Process(target=_rehearse, args=(cell, own, ready, results, _SECONDS, level), daemon=True)
            process.start()
            processes.append(process)
        while len(found) < count:
            try:
                found.append(results.get(timeout=0.2))
            except queue.Empty:
                ended = [process.exitcode for process in processes if process.exitcode]
                if ended:
                    found.append(Rehearsal(fault=f"a process ended with {ended[0]}; was there memory enough?"))
                elif time.monotonic() > end:
                    found.append(Rehearsal(fault=f"it took more than {_PATIENCE:.0f} seconds"))
            if found and found[-1].fault is not None:
                return found[-1]
        return Rehearsal(sum(each.rate for each in found), max(each.shared for each in found))
    except OSError as error:
        return Rehearsal(fault=f"no process could be started: {error}")
    finally:
        for process in processes:
            if len(found) < count or found[-1].fault is not None:  # others may wait for one that is gone
                process.terminate()
            process.join()


def _rehearse(cell: Cell, place: Place, ready: Any, results: Any, seconds: float, level: int) -> None:
    settle(level)
    try:
        spec = cell.spec
        runtime = set_up(place, spec)
        task, data = spec.task.bind(), spec.task.open(require_prepared(spec, place.cache))
        model = build_model(spec).to(runtime.device)
        data = task.adapt(model, data, derive(spec.seed, "adapt"), fresh=False)
        seed_everything(derive(spec.seed, "train"))
        with relieved(place.threads, lambda told: None) as cores:
            given = {"seed": spec.seed, "runtime": runtime, "begin": ready.wait, "seconds": seconds}
            rate = pace(task, model, data, spec.train, **given)
        results.put(Rehearsal(rate, cores.seconds or 0.0))
    except Exception as error:  # which the cell itself will meet, and tell whole
        results.put(Rehearsal(fault=f"{type(error).__name__}: {first_line(error)}"))
