"""Finished cells of other tables: the run that is there already need not be made twice."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from attnbench.core.errors import AttnbenchError
from attnbench.core.files import write_atomic, write_json
from attnbench.core.lock import LockedError, locked
from attnbench.core.run_files import CELLS, CHECKPOINTS, ERROR, LOCK, RESULT, TESTS, TRACEBACK, cell_folder, read_tests
from attnbench.experiment.grid import Cell
from attnbench.experiment.run import read_result

_UNSAVED = (CHECKPOINTS, LOCK, ERROR, TRACEBACK)
"""What a copy of a finished cell leaves behind."""


def adopt(root: Path, cell: Cell, finished: Mapping[str, Sequence[Path]], content: str | None = None) -> Path | None:
    """Copy the finished cell of the same digest from another table, checkpoints aside. finished: of `finished_in`.

    content: hash of the data prepared here; a cell made from other data is not the same run. None: not known.
    Returns where it was found, None if nowhere: the same run need not be made twice for two tables.
    """
    target = cell_folder(root, cell.folder)
    found = find_done(root, cell, finished, content)
    if found is not None:
        try:
            with locked(target / LOCK):
                _copy(found, target)
        except LockedError:  # whoever runs it will finish it
            return None
        _remember_tests(found.parents[1] / TESTS, root / TESTS)
    return found


def share(root: Path, done: Cell, twin: Cell) -> None:
    """Copy a cell that has just been finished to one of the same digest that has another label."""
    target = cell_folder(root, twin.folder)
    with suppress(LockedError), locked(target / LOCK):  # whoever holds it will finish it
        _copy(cell_folder(root, done.folder), target)


def finished_in(places: Iterable[Path]) -> dict[str, list[Path]]:
    """The folders of finished cells, by the part of their digest that ends their names."""
    found: dict[str, list[Path]] = defaultdict(list)
    for place in places:
        for result in sorted(place.glob(f"**/{CELLS}/*-*/{RESULT}")):
            found[result.parent.name.rpartition("-")[2]].append(result.parent)
    return found


def find_done(
    root: Path, cell: Cell, finished: Mapping[str, Sequence[Path]], content: str | None = None
) -> Path | None:
    """The finished cell that `adopt` would copy, None if there is none; touches nothing. finished: of `finished_in`."""
    target = cell_folder(root, cell.folder)
    for folder in finished.get(cell.digest[:8], ()):
        if folder != target and is_same_run(folder, cell.digest, content):
            return folder
    return None


def _remember_tests(theirs: Path, ours: Path) -> None:
    """Where the corpus's text is not at hand, tests that were made beside a cell cannot be made again."""
    own = read_tests(ours)
    both = {**read_tests(theirs), **own}
    if both != own:
        write_json(ours, both)


def _copy(source: Path, target: Path) -> None:
    if target.is_dir() and source.samefile(target):  # names that differ in case alone, on a disk that sees none
        return
    for entry in sorted(source.iterdir()):
        if entry.name in (*_UNSAVED, RESULT) or entry.name.startswith("."):
            continue
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name, dirs_exist_ok=True)
        else:
            write_atomic(target / entry.name, entry.read_bytes())
    for name in (ERROR, TRACEBACK):
        (target / name).unlink(missing_ok=True)
    write_atomic(target / RESULT, (source / RESULT).read_bytes())


def is_same_run(folder: Path, digest: str, content: str | None) -> bool:
    """Whether a cell's folder holds the result of that digest, made from data of that hash (None: whichever)."""
    try:
        found = read_result(folder)
    except AttnbenchError:
        return False  # damaged: no result
    made_from = found.get("data", {}).get("content_sha256")
    return found.get("digest") == digest and (content is None or made_from in (None, content))
