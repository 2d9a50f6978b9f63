"""Copies of run folders that are worth committing: everything but checkpoints, locks and the corpus's own text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attnbench
from attnbench.core.errors import AttnbenchError, SpecError
from attnbench.core.files import folder_atomic, write_json
from attnbench.core.run_files import (
    CHECKPOINTS,
    GRID,
    LOCK,
    OUTPUTS,
    RESULT,
    SPEC,
    TESTS,
    TRACEBACK,
    cell_folder,
    read_tests,
)
from attnbench.report.collect import Cell, collect
from attnbench.report.significance import PairedTests
from attnbench.report.table import report, write_results

_LEFT_OUT = (CHECKPOINTS, TRACEBACK)
_ENDINGS = (".ref.txt", ".src.txt", ".lock", ".tmp")


def save(folder: Path, into: Path) -> Path:
    """Copy the run folder to `into`/<last part of its name>, whole or not at all; returns that path.

    Cells that only the copy has stay there, so that a long table can grow over several machines. The corpus's text is
    left out: references and sources (hyps/*.ref.txt, *.src.txt), and outputs that copy it. What else lies in the copy,
    like a README, stays. Raises DataError where `folder` is no run folder, SpecError where the copy would lie in it or
    take the place of what is none, or its place cannot be made, AttnbenchError where a cell that is done in the copy
    would be replaced by a different result.
    """
    tests = PairedTests(folder)
    experiment = report(folder, tests).experiment
    copies = {cell.folder.name for cell in experiment.cells if _copies_text(cell)}
    target = (into / experiment.title).resolve()
    _require_copy(target, folder)
    ours = _grid(folder)
    theirs = _grid(target) if (target / GRID).exists() else {"name": ours["name"], "cells": []}
    if theirs["name"] != ours["name"]:
        raise AttnbenchError(f"{target} holds another experiment, {theirs['name']}: save to another folder")
    ours_folders = {cell["folder"] for cell in ours["cells"]}
    kept = {cell["folder"] for cell in theirs["cells"] if _keeps(folder, target, cell["folder"])}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # of a place like /proc rights say nothing
        raise SpecError(f"{target.parent}: it cannot be made ({error.strerror}); name another place") from None
    with folder_atomic(target) as work:
        for name in sorted(ours_folders | {cell["folder"] for cell in theirs["cells"]}):
            source = cell_folder(target if name in kept else folder, name)
            if source.is_dir():
                shutil.copytree(source, cell_folder(work, name), ignore=_unwanted)
                if name in copies:
                    shutil.rmtree(cell_folder(work, name) / OUTPUTS, ignore_errors=True)
        write_json(work / GRID, {**_portable(ours), "cells": _merged(theirs["cells"], ours["cells"])})
        if (folder / SPEC).is_file():
            shutil.copyfile(folder / SPEC, work / SPEC)
        write_json(work / TESTS, {**read_tests(target / TESTS), **tests.asked})
        write_results(work)
        _keep_others(target, work)
    return into / experiment.title


def _require_copy(target: Path, folder: Path) -> None:
    """Raise SpecError where `target` and the run folder hold one another, or it is there and no copy of an earlier
    save."""
    if folder.resolve().is_relative_to(target):
        raise SpecError(f"{target}: the run folder is there, or in it; save to another place, like results")
    if target.is_relative_to(folder.resolve()):
        raise SpecError(f"{target}: this is in the run folder; save to a place outside of it")
    if target.exists() and not (target.is_dir() and ((target / GRID).exists() or not any(target.iterdir()))):
        raise SpecError(f"{target}: is there, and holds no {GRID}: no table was saved there; name another place")


def _keep_others(target: Path, work: Path) -> None:
    """What people have put beside the cells of a copy."""
    for entry in sorted(target.iterdir()) if target.is_dir() else ():
        if (work / entry.name).exists() or entry.name == LOCK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, work / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, work / entry.name, follow_symlinks=False)


def _copies_text(cell: Cell) -> bool:
    """Whether the outputs are a corpus's own text: those of a model that copies, but for generated sequences."""
    task = cell.spec.get("task") or {}
    return task.get("kind") == "copying" and (task.get("dataset") or {}).get("kind") != "copy"


def _grid(folder: Path) -> dict[str, Any]:
    collect(folder)  # its errors are for people
    return json.loads((folder / GRID).read_text(encoding="utf-8"))


def _portable(grid: dict[str, Any]) -> dict[str, Any]:
    """The grid without paths that only this machine has: what lies below the working directory is named from there, a
    folder of corpus files elsewhere is DIR, and where runs were kept is not named."""
    here = f"{Path.cwd()}/"
    command = re.sub(r" ('--runs=[^']*'|--runs[= ]('[^']*'|\S+))", "", str(grid.get("command") or "")).replace(here, "")
    command = re.sub(r" (?:'--from=/[^']*'|--from[= ](?:'/[^']*'|/\S+))", " --from DIR", command)
    source = str(grid.get("source") or "").replace(here, "")
    if Path(source).is_absolute():
        package = Path(attnbench.__file__).parents[1]
        source = str(Path(source).relative_to(package)) if Path(source).is_relative_to(package) else Path(source).name
    return {**grid, "command": command, "source": source or None}


def _keeps(folder: Path, target: Path, name: str) -> bool:
    """Whether the copy's cell stays: it is done and ours is not, or only the copy has it, or both are the same."""
    theirs, ours = cell_folder(target, name) / RESULT, cell_folder(folder, name) / RESULT
    if theirs.exists() and ours.exists() and theirs.read_bytes() != ours.read_bytes():
        raise AttnbenchError(
            f"{theirs} holds a different result: nothing was saved; delete that cell if the new one is to replace it"
        )
    return theirs.exists() or not cell_folder(folder, name).is_dir()


def _merged(theirs: list[Mapping[str, Any]], ours: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Our cells in our order; where the copy has some of its own, the copy's first."""
    mine = {cell["folder"] for cell in ours}
    if all(cell["folder"] in mine for cell in theirs):
        return ours
    known = {cell["folder"]: cell for cell in ours}
    first = [known.get(cell["folder"], cell) for cell in theirs]
    return [*first, *(cell for cell in ours if cell["folder"] not in {item["folder"] for item in first})]


def _unwanted(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name in _LEFT_OUT or name.startswith((".", LOCK)) or name.endswith(_ENDINGS)]
