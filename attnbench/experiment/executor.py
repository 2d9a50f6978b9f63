"""Run the cells of a grid: one after another, or several at a time in processes of their own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Protocol

from attnbench.core.errors import AttnbenchError
from attnbench.core.processor import usable_cores
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import Listener, Place, run_cell
from attnbench.experiment.progress import plain_listener
from attnbench.experiment.run import Run, is_done
from attnbench.experiment.sharing import take_training, training_digest


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended. error: None when it is done; a failed cell is an outcome, not an exception. held: another
    process is at it, or a file in its place, and nothing of it was touched."""

    cell: Cell
    error: str | None = None
    held: bool = False


class Executor(Protocol):
    """Runs cells and yields each one's outcome as it ends."""

    def map(self, cells: Sequence[Cell]) -> Iterator[CellOutcome]: ...


def attempt(root: Path, cell: Cell, place: Place, fresh: bool, listen: Listener) -> CellOutcome:
    """Run one cell in this process; whatever it raises but an interrupt becomes error.txt."""
    try:
        with Run.claim(root, cell) as run:
            if fresh:
                run.fresh()
            elif is_done(root, cell):  # by another process, since this one made its list
                return CellOutcome(cell, None)
            return CellOutcome(cell, _run(cell, run, place, listen, fresh))
    except AttnbenchError as error:
        return CellOutcome(cell, str(error), held=True)
    except OSError as error:  # not even its folder can be written
        return CellOutcome(cell, f"{root}: {error}")


def _run(cell: Cell, run: Run, place: Place, listen: Listener, fresh: bool) -> str | None:
    try:
        if not fresh:
            take_training(cell, run, place.cache)
        run_cell(cell, run, place, listen)
    except AttnbenchError as error:
        run.fail(str(error))
        return str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        run.fail(reason, traceback.format_exc())
        return reason
    return None


@dataclass(frozen=True)
class Inline:
    """One cell after another in this process."""

    root: Path
    place: Place
    fresh: bool
    listen: Callable[[Cell], Listener]

    def map(self, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        for cell in cells:
            yield attempt(self.root, cell, self.place, self.fresh, self.listen(cell))


class _Worker:
    """A process that runs one cell at a time, and is replaced when it dies."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        self._pool = self._start()

    def _start(self) -> ProcessPoolExecutor:
        level = logging.getLogger("attnbench").getEffectiveLevel()
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=spawn, initializer=settle, initargs=(level,))

    def submit(self, root: Path, cell: Cell, place: Place, fresh: bool) -> Future[CellOutcome]:
        return self._pool.submit(_work, root, cell, replace(place, device=self.device or place.device), fresh)

    def restart(self) -> None:
        self._pool.shutdown(wait=False)
        self._pool = self._start()

    def stop(self) -> None:
        for process in list((self._pool._processes or {}).values()):  # it may be in the middle of a training
            process.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Processes:
    """`jobs` cells at a time, each in a process of its own, with its share of the threads and, if any, of the GPUs.

    A process that dies takes its own cell with it and no other.
    """

    root: Path
    place: Place
    fresh: bool
    jobs: int
    devices: tuple[str, ...] = ()

    def map(self, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        waiting = list(cells)
        workers = [_Worker(self._device(index)) for index in range(min(self.jobs, len(cells)))]
        idle = list(workers)
        running: dict[Future[CellOutcome], tuple[Cell, _Worker]] = {}
        over: set[str] = set()  # trainings that are done
        try:
            while waiting or running:
                while idle and (cell := self._next(waiting, [cell for cell, _ in running.values()], over)):
                    waiting.remove(cell)
                    worker = idle.pop()
                    running[worker.submit(self.root, cell, self.place, self.fresh)] = (cell, worker)
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    cell, worker = running.pop(future)
                    idle.append(worker)
                    outcome = self._outcome(future, cell, worker)
                    if outcome.error is None:
                        over.add(training_digest(cell.spec))
                    yield outcome
        finally:
            for worker in workers:
                worker.stop()

    def _next(self, waiting: list[Cell], running: list[Cell], over: set[str]) -> Cell | None:
        """The first cell whose training is not under way in another: it will take that one over."""
        taken = set() if self.fresh else {training_digest(cell.spec) for cell in running} - over
        return next((cell for cell in waiting if training_digest(cell.spec) not in taken), None)

    def _device(self, index: int) -> str | None:
        return self.devices[index % len(self.devices)] if self.devices else None

    def _outcome(self, future: Future[CellOutcome], cell: Cell, worker: _Worker) -> CellOutcome:
        try:
            return future.result()
        except BrokenProcessPool:
            worker.restart()
        if not self.fresh and is_done(self.root, cell):  # it died after its last word
            return CellOutcome(cell)
        without = ", without --fresh" if self.fresh else ""
        reason = f"its process died (killed, or out of memory); run the same command again to go on{without}"
        with suppress(AttnbenchError, OSError), Run.claim(self.root, cell) as run:
            run.fail(reason)
        return CellOutcome(cell, reason)


def settle(level: int) -> None:
    """Make a new process a worker: it logs as its parent does, leaves Ctrl-C to it, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("attnbench")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # what is on disk is whole at any moment


def _work(root: Path, cell: Cell, place: Place, fresh: bool) -> CellOutcome:
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
    """Inline for one job, processes for more; each gets an equal share of the cores that this process may use."""
    threads = max(1, usable_cores() // max(1, jobs))
    place = replace(place, threads=threads, jobs=max(1, jobs))
    if jobs <= 1:
        return Inline(root, place, fresh, listen)
    return Processes(root, place, fresh, jobs, devices)
