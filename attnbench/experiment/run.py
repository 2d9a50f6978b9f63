"""Run: the folder of one cell. Claimed by a lock, read back from its files, finished by result.json written last."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnbench.core.errors import AttnbenchError, SpecError
from attnbench.core.files import (
    append_jsonl,
    dump_yaml,
    jsonl,
    parse_yaml,
    read_json,
    read_jsonl,
    remove_folder,
    sweep,
    write_atomic,
    write_json,
    write_lines,
)
from attnbench.core.lock import LockedError, locked
from attnbench.core.spec import differing
from attnbench.experiment.grid import Cell, Experiment
from attnbench.experiment.spec import TableSpec

log = logging.getLogger("attnbench")

ERROR, TRACEBACK = "error.txt", "traceback.txt"
UNSAVED = ("checkpoints", "lock", ERROR, TRACEBACK)
"""What a copy of a finished cell leaves behind."""
TESTS = "significance.json"
"""What a run folder remembers of paired tests, under hashes of the lines that were tested (report/significance.py)."""


class Run:
    """runs/<name>/cells/<folder>/, held by this process. Make one with `Run.claim`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.borrowed_seconds = 0.0
        """Of the training, made in another cell."""

    @classmethod
    @contextmanager
    def claim(cls, root: Path, cell: Cell) -> Iterator[Run]:
        """Hold the cell's folder for the length of the block. Raises AttnbenchError while another process has it.

        What a killed process left half-written is cleared away; so is the error of an earlier attempt.
        """
        folder = root / "cells" / cell.folder
        try:
            with locked(folder / "lock"):
                run = cls(folder)
                for place in (folder, run.checkpoints, folder / "hyps"):
                    sweep(place)
                write_atomic(folder / "spec.yaml", dump_yaml(cell.spec.dump()))
                for name in (ERROR, TRACEBACK):
                    (folder / name).unlink(missing_ok=True)
                yield run
        except LockedError as error:
            raise AttnbenchError(f"{error}: the cell is being run there; wait for it, or end it") from None

    def log(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        append_jsonl(self.folder / "metrics.jsonl", record)

    def rewind(self, step: int) -> None:
        """Cut the lines of metrics.jsonl that lie past `step`."""
        path = self.folder / "metrics.jsonl"
        kept = [record for record in read_jsonl(path) if record.get("step", 0) <= step]
        write_atomic(path, "".join(map(jsonl, kept)))

    def fresh(self) -> None:
        """Forget every checkpoint, log and output."""
        for name in ("result.json", "metrics.jsonl", "env.json"):  # first, or a kill would leave a finished cell
            (self.folder / name).unlink(missing_ok=True)
        for name in ("checkpoints", "hyps"):
            remove_folder(self.folder / name)

    def output(self, name: str, lines: Iterable[str]) -> None:
        """hyps/<name>, a line each."""
        write_lines(self.folder / "hyps" / name, lines)

    def environment(self, content: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
        """Note in env.json what goes on with this cell from `step` on; returns every such note, oldest first.

        An earlier attempt stays for the steps that it left; one that began at `step` or past it has left none.
        """
        path = self.folder / "env.json"
        earlier = environments(path) if path.is_file() else []
        attempts = [attempt for attempt in earlier if attempt["from_step"] < step]
        attempts.append({"from_step": step, **content})
        write_json(path, {"attempts": attempts})
        return attempts

    def finish(self, result: Mapping[str, Any]) -> None:
        """result.json: from now on the cell is done."""
        write_json(self.folder / "result.json", result)

    def fail(self, reason: str, traceback: str = "") -> None:
        """error.txt: from now on the cell has failed; running it again starts from its newest checkpoint.

        The reason is kept with the results and names no place of this machine; the traceback stays in the run folder.
        """
        if traceback:
            write_atomic(self.folder / TRACEBACK, traceback)
        portable = reason.replace(f"{Path.cwd()}/", "").replace(f"{Path.home()}/", "~/")
        write_atomic(self.folder / ERROR, portable.rstrip() + "\n")


def environments(path: Path) -> list[dict[str, Any]]:
    """The attempts of an env.json, oldest first; older files hold the last one alone."""
    content = read_json(path, "delete it; the attempts before this one are then not known")
    return content.get("attempts", [{"from_step": 0, **content}])


def is_done(root: Path, cell: Cell) -> bool:
    return (root / "cells" / cell.folder / "result.json").is_file()


def adopt(root: Path, cell: Cell, elsewhere: Iterable[Path], content: str | None = None) -> Path | None:
    """Copy the finished cell of the same digest from one of the folders `elsewhere`, checkpoints aside.

    content: hash of the data prepared here; a cell made from other data is not the same run. None: not known.
    Returns where it was found, None if nowhere: the same run need not be made twice for two tables.
    """
    target = root / "cells" / cell.folder
    found = find_done(root, cell, elsewhere, content)
    if found is not None:
        try:
            with locked(target / "lock"):
                _copy(found, target)
        except LockedError:  # whoever runs it will finish it
            return None
        _remember_tests(found.parents[1] / TESTS, root / TESTS)
    return found


def find_done(root: Path, cell: Cell, elsewhere: Iterable[Path], content: str | None = None) -> Path | None:
    """The finished cell that `adopt` would copy, None if there is none; touches nothing."""
    target = root / "cells" / cell.folder
    for place in elsewhere:
        for result in sorted(place.glob(f"**/cells/*-{cell.digest[:8]}/result.json")):
            if result.parent != target and _belongs(result, cell, content):
                return result.parent
    return None


def _remember_tests(theirs: Path, ours: Path) -> None:
    """Where the corpus's text is not at hand, tests that were made beside a cell cannot be made again."""
    own = _mapping(ours)
    both = {**_mapping(theirs), **own}
    if both != own:
        write_json(ours, both)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _copy(source: Path, target: Path) -> None:
    for entry in sorted(source.iterdir()):
        if entry.name in (*UNSAVED, "result.json") or entry.name.startswith("."):
            continue
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name, dirs_exist_ok=True)
        else:
            write_atomic(target / entry.name, entry.read_bytes())
    for name in (ERROR, TRACEBACK):
        (target / name).unlink(missing_ok=True)
    write_atomic(target / "result.json", (source / "result.json").read_bytes())


def _belongs(result: Path, cell: Cell, content: str | None) -> bool:
    try:
        found = json.loads(result.read_bytes())
        made_from = found.get("data", {}).get("content_sha256")
        return found["digest"] == cell.digest and (content is None or made_from in (None, content))
    except (OSError, ValueError, KeyError, TypeError):
        return False  # damaged: no result


def write_grid(root: Path, experiment: Experiment, command: str) -> None:
    """runs/<name>/{spec.yaml,grid.json}: what the table is made from.

    Cells chosen from a grid join the grid that is there; a whole grid takes its place. Raises AttnbenchError while
    another process is writing there.
    """
    try:
        with locked(root / "lock"):
            _write_grid(root, experiment, command)
    except LockedError as error:
        raise AttnbenchError(f"{error}: another command has just begun there; run this one again") from None


def _write_grid(root: Path, experiment: Experiment, command: str) -> None:
    document, path = experiment.document, root / "grid.json"
    entries = [cell.entry() for cell in experiment.cells]
    there = _grid(path)
    if there is not None and not {_spot(entry) for entry in there["cells"]} <= set(map(_spot, entries)):
        if experiment.part:
            write_json(path, {**there, "cells": _joined(root, there["cells"], entries, experiment.cells)})
            return
        log.info("%s: takes the place of a table with other cells, %d in all; they stay", root, len(there["cells"]))
    write_atomic(root / "spec.yaml", dump_yaml(_readable(document.raw, experiment.table)))
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


def _readable(raw: Mapping[str, Any], table: TableSpec) -> dict[str, Any]:
    """The spec with its table over the axes that there are, so that it can be read again without the options."""
    given = raw.get("table")
    if not isinstance(given, Mapping):
        return dict(raw)
    return {**raw, "table": {**given, **{key: getattr(table, key) for key in ("rows", "cols") if key in given}}}


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
        theirs, _ = parse_yaml((root / "cells" / entry["folder"] / "spec.yaml").read_text(encoding="utf-8"), "")
    except (SpecError, OSError, ValueError):
        return False
    return isinstance(theirs, Mapping) and bool(set(differing(theirs, system)) - {"seed"})
