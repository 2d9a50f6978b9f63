"""What a run would do, and nothing of it done."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnbench.core.run_files import cell_folder
from attnbench.experiment.adopt import find_done
from attnbench.experiment.finished import (
    content_of,
    damaged_results,
    finished_elsewhere,
    is_prepared,
    of_other_data,
    warn_of_changed_code,
    warn_of_results_not_taken,
)
from attnbench.experiment.grid import Cell, Experiment
from attnbench.experiment.pipeline import count_parameters
from attnbench.experiment.run import is_done
from attnbench.experiment.settings import Settings, root_of

log = logging.getLogger("attnbench")


def dry_run(experiment: Experiment, settings: Settings) -> dict[str, Any]:
    """What a run would do: the resolved spec, the cells, parameters, whether the data are there. Writes nothing.

    A cell is done, too, where a run would take over its result; `taken_from` is the place.
    """
    root = root_of(experiment, settings)
    counted: dict[str, int] = {}
    damaged = {} if settings.fresh else damaged_results(root, experiment.cells)
    for reason in damaged.values():
        log.warning("%s", reason)
    sound = [cell for cell in experiment.cells if cell.folder not in damaged]
    unsettled = _unsettled(sound, settings)
    for file in dict.fromkeys(itertools.chain(*unsettled.values())):
        log.warning("%s is not what it was when it was prepared; a run prepares it again", file)
    if not settings.fresh:
        _warn_of_other_data(root, sound, unsettled, settings)
    finished = finished_elsewhere(experiment, settings)
    perhaps = 0
    cells, pending, taken = [], [], []
    for cell in experiment.cells:
        key = json.dumps([cell.spec.model.dump(), list(cell.spec.task.model_sizes())])
        if key not in counted:
            counted[key] = count_parameters(cell.spec)
        at = cell.spec.task.data_path(settings.cache)
        counts = not (settings.fresh or cell.folder in damaged or at in unsettled)
        own, origin = counts and is_done(root, cell) and of_other_data(root, cell, settings) is None, None
        if counts and not is_done(root, cell):
            origin = find_done(root, cell, finished(), content_of(cell, settings))
        if at in unsettled and not settings.fresh and not is_done(root, cell):
            perhaps += find_done(root, cell, finished()) is not None
        elif counts and not own and origin is None:
            pending.append(cell)
        if own or origin is not None:
            taken.append((cell, origin or cell_folder(root, cell.folder)))
        cells.append(
            {
                **cell.entry(),
                "parameters": counted[key],
                "done": own or origin is not None,
                "taken_from": None if origin is None else str(origin),
                "damaged": damaged.get(cell.folder),
                "dataset": cell.spec.task.corpus,
                "data": str(at),
                "data_ready": is_prepared(cell, settings) and at not in unsettled,
            }
        )
    warn_of_changed_code(taken)
    warn_of_results_not_taken(root, pending, finished, settings)
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
        if (other := of_other_data(root, cell, settings)) is not None:
            log.warning("a run stops: %s", other)
            return


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
