"""Run the cells of a grid: one after another, or several at a time in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from attnbench.core.errors import AttnbenchError
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import Listener, Place, run_cell
from attnbench.experiment.progress import plain_listener
from attnbench.experiment.run import Run


@dataclass(frozen=True)
class Outcome:
    """How a cell ended. error: None when it is done; a failed cell is an outcome, not an exception."""

    cell: Cell
    error: str | None = None


class Executor(Protocol):
    """Runs cells and yields each one's outcome as it ends."""

    def map(self, cells: Sequence[Cell]) -> Iterator[Outcome]: ...


def attempt(root: Path, cell: Cell, place: Place, fresh: bool, listen: Listener) -> Outcome:
    """Run one cell in this process; whatever it raises but an interrupt becomes error.txt."""
    try:
        with Run.claim(root, cell) as run:
            if fresh:
                run.fresh()
            try:
                run_cell(cell, run, place, listen)
            except AttnbenchError as error:
                run.fail(str(error))
                return Outcome(cell, str(error))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                run.fail(f"{reason}\n\n{traceback.format_exc()}")
                return Outcome(cell, reason)
    except AttnbenchError as error:  # held by another process: nothing of it was touched
        return Outcome(cell, str(error))
    return Outcome(cell)


@dataclass(frozen=True)
class Inline:
    """One cell after another in this process."""

    root: Path
    place: Place
    fresh: bool
    listen: Callable[[Cell], Listener]

    def map(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        for cell in cells:
            yield attempt(self.root, cell, self.place, self.fresh, self.listen(cell))


@dataclass(frozen=True)
class Processes:
    """`jobs` cells at a time, each in a process of its own, with its share of the threads and, if any, of the GPUs."""

    root: Path
    place: Place
    fresh: bool
    jobs: int
    devices: tuple[str, ...] = ()

    def map(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        context = multiprocessing.get_context("spawn")
        queue = list(enumerate(cells))
        running: dict[Future[Outcome], Cell] = {}
        pool = ProcessPoolExecutor(self.jobs, mp_context=context)
        try:
            while queue or running:
                while queue and len(running) < self.jobs:
                    index, cell = queue.pop(0)
                    running[pool.submit(_work, self.root, cell, self._share(index), self.fresh)] = cell
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                broken = False
                for future in done:
                    cell = running.pop(future)
                    try:
                        yield future.result()
                    except BrokenProcessPool:
                        broken = True
                        yield Outcome(cell, "its process died (out of memory?); run the command again to go on")
                if broken:  # the pool is spent: a new one takes the cells that were not started
                    for cell in running.values():
                        yield Outcome(cell, "its process died with another cell's; run the command again to go on")
                    running = {}
                    pool = ProcessPoolExecutor(self.jobs, mp_context=context)
        finally:
            for process in list((pool._processes or {}).values()):  # an interrupt must not wait for whole trainings
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)

    def _share(self, index: int) -> Place:
        device = self.devices[index % len(self.devices)] if self.devices else self.place.device
        return replace(self.place, device=device)


def _work(root: Path, cell: Cell, place: Place, fresh: bool) -> Outcome:
    return attempt(root, cell, place, fresh, plain_listener(cell.label, cell.seed))


def choose_executor(
    root: Path,
    place: Place,
    *,
    jobs: int,
    fresh: bool,
    listen: Callable[[Cell], Listener],
    devices: tuple[str, ...] = (),
) -> Executor:
    """Inline for one job, processes for more; each gets an equal share of the processor's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // max(1, jobs))
    place = replace(place, threads=threads)
    if jobs <= 1:
        return Inline(root, place, fresh, listen)
    return Processes(root, place, fresh, jobs, devices)
