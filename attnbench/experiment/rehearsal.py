"""How many cells at a time get most done on this machine: the first of them is trained for some seconds, alone and
several times at once, and nothing of it stays."""

from __future__ import annotations

import logging
import multiprocessing
import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnbench.core import measured
from attnbench.core.errors import AttnbenchError
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


class _FailedError(AttnbenchError):
    """Not even as few as there may be are trained: nothing is known, and nothing kept."""


def jobs_that_pay(first: Cell, pending: Sequence[Cell], place: Place, devices: Sequence[str]) -> int:
    """How many of the pending cells, whose data are prepared, to train at a time: of one, two, four and so on, up to
    the cores, or to four on a GPU, the number that makes most target tokens a second; more only where it is clearly
    more.

    Measured once for this machine and the table that has this cell first, and kept, whichever cells are left: what is
    resumed goes on with the same threads. One where decoding is timed, which others beside it would spoil. devices:
    GPUs that they share out among themselves.
    """
    if len(pending) < 2:
        return 1
    if any(cell.spec.timing for cell in pending):
        log.info("--jobs auto: one cell at a time, for decoding is timed")
        return 1
    counts = _counts(place, devices)
    found: float | None = counts[0]
    if len(counts) > 1:
        name = "|".join([training_digest(first.spec.replace(seed=0)), *map(str, counts), _machine(place)])
        try:
            found = measured.once("jobs", "jobs", lambda: float(_best(pending[0], place, devices, counts)), of=name)
        except _FailedError as error:  # which the cell itself will tell
            log.warning("--jobs auto: %s; as many at a time as without", error)
    return min(len(pending), counts[0] if found is None else int(found))


def _machine(place: Place) -> str:
    """What beside the processor decides."""
    device = choose_device(place.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _counts(place: Place, devices: Sequence[str]) -> list[int]:
    least = max(1, len(devices))
    most = 4 * least if devices or choose_device(place.device).type != "cpu" else usable_cores()
    return [least << times for times in range(10) if least << times <= most]


def _best(cell: Cell, place: Place, devices: Sequence[str], counts: Sequence[int]) -> int:
    best, fastest, alone = counts[0], 0.0, None
    for count in counts:
        rate = _together(cell, count, place, devices)
        if rate is None and alone is None:
            raise _FailedError(f"[{cell.label}, seed {cell.seed}] did not get through its rehearsal")
        if rate is None:
            log.info("--jobs auto: %d at a time did not get through their rehearsal", count)
            break
        alone = alone or rate
        log.info("--jobs auto: %d at a time make %.0f target tokens a second, %.2f times those of %d",
                 count, rate, rate / alone, counts[0])  # fmt: skip
        if rate > _CLEARLY * fastest:
            best, fastest = count, rate
    return best


def _together(cell: Cell, count: int, place: Place, devices: Sequence[str]) -> float | None:
    """Target tokens a second of so many; None where one fails, as where memory is not enough."""
    context = multiprocessing.get_context("spawn")
    ready, rates = context.Barrier(count), context.Queue()
    threads, level = max(1, usable_cores() // count), log.getEffectiveLevel()
    processes = []
    for index in range(count):
        device = devices[index % len(devices)] if devices else place.device
        own = replace(place, device=device, threads=threads, jobs=count)
        process = context.Process(target=_rehearse, args=(cell, own, ready, rates, _SECONDS, level), daemon=True)
        process.start()
        processes.append(process)
    found: list[float] = []
    end = time.monotonic() + _PATIENCE
    try:
        while len(found) < count:
            try:
                found.append(rates.get(timeout=0.2))
            except queue.Empty:
                if time.monotonic() > end or any(process.exitcode not in (None, 0) for process in processes):
                    return None
        return sum(found)
    finally:
        for process in processes:
            if len(found) < count:
                process.terminate()
            process.join()


def _rehearse(cell: Cell, place: Place, ready: Any, rates: Any, seconds: float, level: int) -> None:
    settle(level)
    spec = cell.spec
    runtime = set_up(place, spec)
    task, data = spec.task.bind(), spec.task.open(require_prepared(spec, place.cache))
    model = build_model(spec).to(runtime.device)
    data = task.adapt(model, data, derive(spec.seed, "adapt"), fresh=False)
    seed_everything(derive(spec.seed, "train"))
    rates.put(pace(task, model, data, spec.train, seed=spec.seed, runtime=runtime, begin=ready.wait, seconds=seconds))
