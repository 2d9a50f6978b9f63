"""grid.json and spec.yaml of a run folder: the cells that its table is made from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnbench.core.errors import AttnbenchError, SpecError
from attnbench.core.files import dump_yaml, parse_yaml, write_atomic, write_json
from attnbench.core.lock import LockedError, locked
from attnbench.core.run_files import GRID, LOCK, SPEC, cell_folder
from attnbench.core.spec import differing
from attnbench.experiment.grid import Cell, Experiment

log = logging.getLogger("attnbench")


def write_grid(root: Path, experiment: Experiment, command: str) -> None:
    """runs/<name>/{spec.yaml,grid.json}: what the table is made from.

    Cells chosen from a grid join the grid that is there; a whole grid takes its place. Raises AttnbenchError while
    another process is writing there.
    """
    try:
        with locked(root / LOCK):
            _write_grid(root, experiment, command)
    except LockedError as error:
        raise AttnbenchError(f"{error}: another command has just begun there; run this one again") from None


def _write_grid(root: Path, experiment: Experiment, command: str) -> None:
    document, path = experiment.document, root / GRID
    entries = [cell.entry() for cell in experiment.cells]
    there = _grid(path)
    if there is not None and not {_spot(entry) for entry in there["cells"]} <= set(map(_spot, entries)):
        if experiment.part:
            write_json(path, {**there, "cells": _joined(root, there["cells"], entries, experiment.cells)})
            return
        log.info("%s: takes the place of a table with other cells, %d in all; they stay", root, len(there["cells"]))
    write_atomic(root / SPEC, dump_yaml(_readable(experiment)))
    write_json(
        path,
        {
            "schema_version": 1,
            "name": experiment.name,
            "command": command,
            "source": None if document.path is None else str(document.path),
            "table": experiment.table.dump(),
            "cells": entries,
        },
    )


def _readable(experiment: Experiment) -> dict[str, Any]:
    """The spec with its table over the axes that there are, and the seeds that were run, so that it can be read again
    without the options."""
    raw, table = dict(experiment.document.raw), experiment.table
    given = raw.get("table")
    if isinstance(given, Mapping):
        raw["table"] = {**given, **{key: getattr(table, key) for key in ("rows", "cols") if key in given}}
    if experiment.seeds:
        grid = {key: value for key, value in (raw.get("grid") or {}).items() if key != "more_seeds"}
        raw["grid"] = {**grid, "seeds": list(experiment.seeds)}
    return raw


def _grid(path: Path) -> dict[str, Any] | None:
    """The grid.json that is there; None where there is none, or a damaged one."""
    try:
        grid = json.loads(path.read_bytes())
        return grid if list(map(_spot, grid["cells"])) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _spot(entry: Mapping[str, Any]) -> tuple[str, str, int]:
    """The place of a cell in its table."""
    return entry["label"], json.dumps(entry["axes"], sort_keys=True), entry["seed"]


def _joined(
    root: Path, there: list[dict[str, Any]], chosen: list[dict[str, Any]], cells: Iterable[Cell]
) -> list[dict[str, Any]]:
    """The cells of a grid with the chosen ones among them: where they stood, or at the end.

    The seeds of a row are of one system: those of other settings than the chosen cell's leave the table.
    """
    new = {_spot(entry): entry for entry in chosen}
    systems = {_spot(cell.entry())[:2]: cell.spec.dump() for cell in cells}
    kept = []
    for entry in there:
        system = systems.get(_spot(entry)[:2])
        own = new.pop(_spot(entry), None)
        if own is None and system is not None and _has_other_settings(root, entry, system):
            log.warning("[%s, seed %d] leaves this table, it has other settings than this command (%s stays)",
                        entry["label"], entry["seed"], entry["folder"])  # fmt: skip
            continue
        if own is not None and own["digest"] != entry["digest"]:
            log.warning("[%s, seed %d] has other settings than the cell that stood in this table (%s stays)",
                        entry["label"], entry["seed"], entry["folder"])  # fmt: skip
        kept.append(own or entry)
    return [*kept, *new.values()]


def _has_other_settings(root: Path, entry: Mapping[str, Any], system: Mapping[str, Any]) -> bool:
    """Whether the cell that stands in a table differs in more than its seed; one not begun has nothing to say."""
    try:
        theirs, _ = parse_yaml((cell_folder(root, entry["folder"]) / SPEC).read_text(encoding="utf-8"), "")
    except (SpecError, OSError, ValueError):
        return False
    return isinstance(theirs, Mapping) and bool(set(differing(theirs, system)) - {"seed"})
