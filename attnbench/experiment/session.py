"""One command over one grid: data made ready, finished cells found, the rest run, every outcome kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from attnbench.core import native
from attnbench.core.run_files import GRID, cell_folder
from attnbench.experiment.adopt import share
from attnbench.experiment.executor import CellOutcome, choose_executor
from attnbench.experiment.finished import (
    damaged_results,
    finished_elsewhere,
    is_prepared,
    may_have_changed,
    take_finished,
    warn_of_changed_code,
    warn_of_results_not_taken,
)
from attnbench.experiment.grid import Cell, Experiment
from attnbench.experiment.grid_file import write_grid
from attnbench.experiment.pipeline import Listener, Place
from attnbench.experiment.preparation import prepare_data
from attnbench.experiment.progress import Bars, plain_listener
from attnbench.experiment.rehearsal import jobs_that_pay
from attnbench.experiment.run import is_done
from attnbench.experiment.settings import Settings, root_of
from attnbench.train.runtime import all_devices, choose_device

log = logging.getLogger("attnbench")


def run_grid(experiment: Experiment, settings: Settings, command: str) -> Iterator[CellOutcome]:
    """Run every cell that is not done, here or among committed results; yields the outcome of each as it ends.

    A cell whose result is damaged fails, and the others are run.
    """
    root = root_of(experiment, settings)
    damaged = {} if settings.fresh else damaged_results(root, experiment.cells)
    for reason in damaged.values():
        log.warning("%s", reason)  # before hours go into what is to be done first
    cells = {cell.folder: cell for cell in experiment.cells if cell.folder not in damaged}.values()
    prepare_data([cell for cell in cells if may_have_changed(cell, settings)], settings)
    finished = finished_elsewhere(experiment, settings)
    done = [] if settings.fresh else [cell for cell in cells if take_finished(root, cell, finished, settings)]
    if done:
        log.info("%d of %d cells are done already", len(done), len(cells) + len(damaged))
        warn_of_changed_code((cell, cell_folder(root, cell.folder)) for cell in done)
    if any(cell.spec.task.own_files(settings.source) and not is_prepared(cell, settings) for cell in done):
        log.warning("%s: the text that results here were made from is not here, so that nothing tells whether it is "
                    "what this spec means", root)  # fmt: skip
    firsts: dict[str, Cell] = {}  # cells of one digest are one run, under two labels
    for cell in cells:
        if cell not in done:
            firsts.setdefault(cell.digest, cell)
    pending = list(firsts.values())
    twins = [cell for cell in cells if cell not in done and cell not in pending]
    prepare_data([cell for cell in pending if not is_prepared(cell, settings)], settings)
    if not settings.fresh:
        warn_of_results_not_taken(root, pending, finished, settings)
    write_grid(root, experiment, command)
    written = (root / GRID).read_bytes()
    if pending and choose_device(settings.device).type == "cpu" and (lacking := native.lacking()):
        log.warning("%s", lacking)
    place, devices = Place(settings.cache, settings.device), all_devices() if settings.device is None else ()
    jobs = min(settings.jobs, max(1, len(pending))) if settings.jobs else 1
    if settings.jobs is None:
        jobs = jobs_that_pay(experiment.cells, pending, place, devices, fresh=settings.fresh)
    if jobs > 1 and any(cell.spec.timing for cell in pending):
        log.warning("decoding is timed while other cells run beside it (--jobs %d): the seconds are theirs too; "
                    "compare them from --jobs 1", jobs)  # fmt: skip
    for cell in experiment.cells:
        if cell.folder in damaged:
            yield CellOutcome(cell, damaged[cell.folder])
    with _listeners(settings, jobs) as listen:
        executor = choose_executor(root, place, jobs=jobs, fresh=settings.fresh, listen=listen, devices=devices)
        for outcome in _held_last(root, executor.map(pending), settings):
            yield outcome
            for twin in twins:
                if twin.digest == outcome.cell.digest:
                    if outcome.error is None:
                        share(root, outcome.cell, twin)
                    yield CellOutcome(twin, outcome.error)
    if (root / GRID).read_bytes() != written:
        log.warning("%s: another command has put its table there meanwhile; this one's takes its place again, and the "
                    "cells of both stay: give each a name of its own", root)  # fmt: skip
        write_grid(root, experiment, command)


def _held_last(root: Path, outcomes: Iterable[CellOutcome], settings: Settings) -> Iterator[CellOutcome]:
    """The outcomes; those of cells that another process was at come last, and may be done by then (though not anew)."""
    held = []
    for outcome in outcomes:
        if outcome.held:
            held.append(outcome)
        else:
            yield outcome
    for outcome in held:
        yield CellOutcome(outcome.cell) if is_done(root, outcome.cell) and not settings.fresh else outcome


@contextmanager
def _listeners(settings: Settings, jobs: int) -> Iterator[Callable[[Cell], Listener]]:
    """What watches each cell: bars where a terminal shows one cell at a time, else plain lines."""
    if settings.terminal is None or jobs > 1:
        yield lambda cell: plain_listener(cell.label, cell.seed)
        return
    with Bars(settings.terminal) as bars:
        yield lambda cell: bars.listener(cell.label, cell.seed, cell.spec.train.max_steps, cell.spec.train.max_epochs)
