"""One command over one grid: data made ready, finished cells found, the rest run, every outcome kept."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from attnbench.core.errors import AttnbenchError
from attnbench.core.files import write_lines
from attnbench.core.run_files import GRID, OUTPUTS, cell_folder
from attnbench.core.version import git_state
from attnbench.data.prepare import read_manifest
from attnbench.experiment.adopt import adopt, find_done
from attnbench.experiment.document import Document, override_document, read_document
from attnbench.experiment.executor import CellOutcome, choose_executor
from attnbench.experiment.grid import Cell, Experiment, expand
from attnbench.experiment.grid_file import write_grid
from attnbench.experiment.pipeline import Listener, Place, content_sha256, count_parameters
from attnbench.experiment.progress import Bars, plain_listener
from attnbench.experiment.run import is_done, read_result
from attnbench.tasks.translation import TranslationSpec
from attnbench.train.runtime import all_devices

log = logging.getLogger("attnbench")


@dataclass(frozen=True)
class Settings:
    """What the command line says of where and how: no part of what a cell is, though device and threads move its
    numbers by rounding, and its speeds.

    source: a folder to prepare data from. fresh: forget what unfinished and finished cells left.
    terminal: where bars are drawn; None: plain lines.
    """

    runs: Path
    cache: Path
    jobs: int = 1
    device: str | None = None
    fresh: bool = False
    source: Path | None = None
    offline: bool = False
    terminal: Console | None = None


def root_of(experiment: Experiment, settings: Settings) -> Path:
    return settings.runs / experiment.name


def run_grid(experiment: Experiment, settings: Settings, command: str) -> Iterator[CellOutcome]:
    """Run every cell that is not done, here or among committed results; yields the outcome of each as it ends.

    A cell whose result is damaged fails, and the others are run.
    """
    root = root_of(experiment, settings)
    damaged = {} if settings.fresh else _damaged(root, experiment.cells)
    for reason in damaged.values():
        log.warning("%s", reason)  # before hours go into what is to be done first
    cells = {cell.folder: cell for cell in experiment.cells if cell.folder not in damaged}.values()
    prepare_data([cell for cell in cells if _may_have_changed(cell, settings)], settings)
    done = [] if settings.fresh else [cell for cell in cells if _found(root, cell, experiment, settings)]
    if done:
        log.info("%d of %d cells are done already", len(done), len(cells) + len(damaged))
    if any(cell.spec.task.own_files(settings.source) and not _prepared(cell, settings) for cell in done):
        log.warning("%s: the text that results here were made from is not here, so that nothing tells whether it is "
                    "what this spec means", root)  # fmt: skip
    firsts: dict[str, Cell] = {}  # cells of one digest are one run, under two labels
    for cell in cells:
        if cell not in done:
            firsts.setdefault(cell.digest, cell)
    pending = list(firsts.values())
    twins = [cell for cell in cells if cell not in done and cell not in pending]
    prepare_data([cell for cell in pending if not _prepared(cell, settings)], settings)
    write_grid(root, experiment, command)
    written = (root / GRID).read_bytes()
    if settings.jobs > 1 and len(pending) > 1 and any(cell.spec.timing for cell in pending):
        log.warning("decoding is timed while other cells run beside it (--jobs %d): the seconds are theirs too; "
                    "compare them from --jobs 1", settings.jobs)  # fmt: skip
    for cell in experiment.cells:
        if cell.folder in damaged:
            yield CellOutcome(cell, damaged[cell.folder])
    with _listeners(settings) as listen:
        executor = choose_executor(
            root, Place(settings.cache, settings.device), jobs=min(settings.jobs, max(1, len(pending))),
            fresh=settings.fresh, listen=listen, devices=all_devices() if settings.device is None else (),
        )  # fmt: skip
        for outcome in _held_last(root, executor.map(pending), settings):
            yield outcome
            for twin in twins:
                if twin.digest == outcome.cell.digest:
                    if outcome.error is None:
                        adopt(root, twin, [root])
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
def _listeners(settings: Settings) -> Iterator[Callable[[Cell], Listener]]:
    """What watches each cell: bars where a terminal shows one cell at a time, else plain lines."""
    if settings.terminal is None or settings.jobs > 1:
        yield lambda cell: plain_listener(cell.label, cell.seed)
        return
    with Bars(settings.terminal) as bars:
        yield lambda cell: bars.listener(cell.label, cell.seed, cell.spec.train.max_steps, cell.spec.train.max_epochs)


def _found(root: Path, cell: Cell, experiment: Experiment, settings: Settings) -> bool:
    if is_done(root, cell):
        if (other := _of_other_data(root, cell, settings)) is not None:
            raise AttnbenchError(other)
        _restore_texts(root, cell, settings)
        return True
    origin = adopt(root, cell, _elsewhere(experiment, settings), _content(cell, settings))
    if origin is not None:
        log.info("[%s, seed %d] taken from %s", cell.label, cell.seed, origin)
        if git_state()[1] or read_result(origin).get("dirty"):
            log.warning("[%s, seed %d] the code has changes that no commit holds, now or when that was made: it may "
                        "come out otherwise; --fresh trains anew", cell.label, cell.seed)  # fmt: skip
        _restore_texts(root, cell, settings)
    return origin is not None


def _of_other_data(root: Path, cell: Cell, settings: Settings) -> str | None:
    """What a run stops with where a result was made from other data than are prepared now."""
    folder = cell_folder(root, cell.folder)
    made_from, present = read_result(folder).get("data", {}).get("content_sha256"), _content(cell, settings)
    if not made_from or not present or made_from == present:
        return None
    return (
        f"{folder}: this result was made from other data than are prepared now; run with --fresh, or under another name"
    )


def _restore_texts(root: Path, cell: Cell, settings: Settings) -> None:
    """Put the corpus's own lines beside the outputs of a cell that came without them, where the data are prepared.

    No saved table holds them; paired tests and examples need them.
    """
    outputs = cell_folder(root, cell.folder) / OUTPUTS
    task = cell.spec.task.bind()
    splits = [path.stem for path in sorted(outputs.glob("*.txt")) if "." not in path.stem]
    absent = [split for split in splits if not all((outputs / f"{split}.{each}").exists() for each in task.kept_texts)]
    if not absent or not _prepared(cell, settings):
        return
    try:
        data = cell.spec.task.open(cell.spec.task.data_path(settings.cache))
        for split in absent:
            for ending, lines in task.texts(data, split).items():
                write_lines(outputs / f"{split}.{ending}", lines)
    except (AttnbenchError, OSError) as error:  # the cell is done all the same
        log.warning("%s: the corpus's text could not be put beside the outputs (%s)", outputs, error)


def _elsewhere(experiment: Experiment, settings: Settings) -> list[Path]:
    """Where finished cells of other tables may be: committed beside the spec, or among the runs."""
    path = experiment.document.path
    places = [*([path.parent / "results"] if path is not None else []), settings.runs]
    return [place for place in places if place.is_dir()]


def _may_have_changed(cell: Cell, settings: Settings) -> bool:
    """Whether the data are looked at before results are taken for theirs: a spec names own files, not their text."""
    own = cell.spec.task.own_files(settings.source)
    return _prepared(cell, settings) or (bool(own) and all(path.exists() for path in own))


def _prepared(cell: Cell, settings: Settings) -> bool:
    return cell.spec.task.prepared(settings.cache) is not None


def _unsettled(cells: Iterable[Cell], settings: Settings) -> dict[Path, list[Path]]:
    """The folders of data that a run would first prepare from the user's own files, and those that have changed since
    they were prepared."""
    found = {}
    for at, task in {cell.spec.task.data_path(settings.cache): cell.spec.task for cell in cells}.items():
        changed, own = task.changed_files(settings.cache, settings.source), task.own_files(settings.source)
        there = bool(own) and all(path.exists() for path in own)
        if changed or (there and task.prepared(settings.cache) is None):
            found[at] = changed
    return found


def _content(cell: Cell, settings: Settings) -> str | None:
    data = cell.spec.task.prepared(settings.cache)
    return None if data is None else content_sha256(data)


def _damaged(root: Path, cells: Iterable[Cell]) -> dict[str, str]:
    """The folders of cells with a result that cannot be read: what mends each."""
    found = {}
    for cell in cells:
        if is_done(root, cell):
            try:
                read_result(cell_folder(root, cell.folder), cell.digest)
            except AttnbenchError as error:
                found[cell.folder] = str(error)
    return found


def prepare_data(cells: Sequence[Cell], settings: Settings) -> None:
    """Prepare the data of every cell once. Raises DataError where they cannot be had."""
    ready: set[Path] = set()
    for cell in cells:
        at = cell.spec.task.data_path(settings.cache)
        if at not in ready:
            cell.spec.task.prepare(settings.cache, settings.source, settings.offline)
            ready.add(at)


def dry_run(experiment: Experiment, settings: Settings) -> dict[str, Any]:
    """What a run would do: the resolved spec, the cells, parameters, whether the data are there. Writes nothing.

    A cell is done, too, where a run would take over its result; `taken_from` is the place.
    """
    root = root_of(experiment, settings)
    counted: dict[str, int] = {}
    damaged = {} if settings.fresh else _damaged(root, experiment.cells)
    for reason in damaged.values():
        log.warning("%s", reason)
    sound = [cell for cell in experiment.cells if cell.folder not in damaged]
    unsettled = _unsettled(sound, settings)
    for file in dict.fromkeys(itertools.chain(*unsettled.values())):
        log.warning("%s is not what it was when it was prepared; a run prepares it again", file)
    if not settings.fresh:
        _warn_of_other_data(root, sound, unsettled, settings)
    perhaps = 0
    cells = []
    for cell in experiment.cells:
        key = json.dumps([cell.spec.model.dump(), list(cell.spec.task.model_sizes())])
        if key not in counted:
            counted[key] = count_parameters(cell.spec)
        at = cell.spec.task.data_path(settings.cache)
        counts = not (settings.fresh or cell.folder in damaged or at in unsettled)
        own, origin = counts and is_done(root, cell) and _of_other_data(root, cell, settings) is None, None
        if counts and not is_done(root, cell):
            origin = find_done(root, cell, _elsewhere(experiment, settings), _content(cell, settings))
        if at in unsettled and not settings.fresh and not is_done(root, cell):
            perhaps += find_done(root, cell, _elsewhere(experiment, settings)) is not None
        cells.append(
            {
                **cell.entry(),
                "parameters": counted[key],
                "done": own or origin is not None,
                "taken_from": None if origin is None else str(origin),
                "damaged": damaged.get(cell.folder),
                "data": str(at),
                "data_ready": _prepared(cell, settings) and at not in unsettled,
            }
        )
    if perhaps:
        log.warning(
            "%d cells are done elsewhere, where that was of the same text: `attnbench prepare` settles it", perhaps
        )
    return {
        "name": experiment.name,
        "folder": str(root),
        "cells": cells,
        "spec": experiment.cells[0].spec.dump(),
        "table": experiment.table.dump(),
    }


def _warn_of_other_data(
    root: Path, cells: Iterable[Cell], unsettled: Mapping[Path, list[Path]], settings: Settings
) -> None:
    """Say that a run will stop, or may, since results here are of other data."""
    done = [cell for cell in cells if is_done(root, cell)]
    for cell in done:
        if cell.spec.task.data_path(settings.cache) in unsettled:
            log.warning("%s: results here are of the text as it was; where other data come of it, a run stops and asks "
                        "for --fresh, or for another name", root)  # fmt: skip
            return
        if (other := _of_other_data(root, cell, settings)) is not None:
            log.warning("a run stops: %s", other)
            return


def prepare_named(what: str, overrides: Sequence[str], settings: Settings) -> list[dict[str, Any]]:
    """Prepare a corpus by its name, or every corpus a spec's cells use; returns folder and counts of each.

    Raises SpecError for an unknown name or a bad spec, DataError where the data cannot be had.
    """
    if what.endswith((".yaml", ".yml")) or Path(what).is_file():
        document = read_document(Path(what), overrides)
        # the spec of a cell has no name, since its table has
        cells = expand(replace(document, raw={"name": "prepare", **document.raw})).cells
    else:
        model = {"kind": "transformer", "tie": "decoder"}  # unused, and fit for any vocabularies
        raw = {"name": "prepare", "task": {"kind": "translation", "dataset": {"kind": what}}, "model": model}
        document = Document(raw, {}, f"prepare {what}", None)
        for override in overrides:
            name = override.partition("=")[0].split(".")[0]
            inner = "task." if name in TranslationSpec.model_fields else "task.dataset."
            document = override_document(document, inner + override)
        cells = expand(document).cells
    prepare_data(cells, settings)
    folders = dict.fromkeys(cell.spec.task.data_path(settings.cache) for cell in cells)
    return [{"path": str(folder), "splits": read_manifest(folder)["splits"]} for folder in folders]
