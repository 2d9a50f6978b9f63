"""Run: the folder of one cell. Claimed by a lock, read back from its files, finished by result.json written last."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnbench.core.errors import AttnbenchError
from attnbench.core.files import append_jsonl, dump_yaml, read_jsonl, write_atomic, write_json
from attnbench.core.lock import LockedError, locked
from attnbench.experiment.grid import Cell, Experiment

UNSAVED = ("checkpoints", "lock")
"""What a copy of a finished cell leaves behind."""


class Run:
    """runs/<name>/cells/<folder>/, held by this process. Make one with `Run.claim`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"

    @classmethod
    @contextmanager
    def claim(cls, root: Path, cell: Cell) -> Iterator[Run]:
        """Hold the cell's folder for the length of the block. Raises AttnbenchError while another process has it."""
        folder = root / "cells" / cell.folder
        try:
            with locked(folder / "lock"):
                run = cls(folder)
                write_atomic(folder / "spec.yaml", dump_yaml(cell.spec.dump()))
                (folder / "error.txt").unlink(missing_ok=True)
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
        path.unlink(missing_ok=True)
        for record in kept:
            append_jsonl(path, record)

    def fresh(self) -> None:
        """Forget every checkpoint, log and output."""
        for name in ("checkpoints", "hyps"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in ("result.json", "metrics.jsonl", "env.json"):
            (self.folder / name).unlink(missing_ok=True)

    def output(self, name: str, lines: Iterable[str]) -> None:
        """hyps/<name>, a line each."""
        write_atomic(self.folder / "hyps" / name, "".join(f"{line}\n" for line in lines))

    def environment(self, content: Mapping[str, Any]) -> None:
        write_json(self.folder / "env.json", content)

    def finish(self, result: Mapping[str, Any]) -> None:
        """result.json: from now on the cell is done."""
        write_json(self.folder / "result.json", result)

    def fail(self, reason: str) -> None:
        """error.txt: from now on the cell has failed; running it again starts from its newest checkpoint."""
        write_atomic(self.folder / "error.txt", reason.rstrip() + "\n")


def is_done(root: Path, cell: Cell) -> bool:
    return (root / "cells" / cell.folder / "result.json").is_file()


def adopt(root: Path, cell: Cell, elsewhere: Iterable[Path]) -> Path | None:
    """Copy the finished cell of the same digest from one of the folders `elsewhere`, checkpoints aside.

    Returns where it was found, None if nowhere: the same run need not be made twice for two tables.
    """
    target = root / "cells" / cell.folder
    for place in elsewhere:
        for result in sorted(place.glob(f"**/cells/*-{cell.digest[:8]}/result.json")):
            if result.parent == target or not _belongs(result, cell):
                continue
            target.mkdir(parents=True, exist_ok=True)
            for entry in sorted(result.parent.iterdir()):
                if entry.name in (*UNSAVED, "result.json"):
                    continue
                if entry.is_dir():
                    shutil.copytree(entry, target / entry.name, dirs_exist_ok=True)
                else:
                    shutil.copy2(entry, target / entry.name)
            write_atomic(target / "result.json", result.read_bytes())
            return result.parent
    return None


def _belongs(result: Path, cell: Cell) -> bool:
    records = result.read_text(encoding="utf-8", errors="replace")
    return f'"{cell.digest}"' in records


def write_grid(root: Path, experiment: Experiment, command: str) -> None:
    """runs/<name>/{spec.yaml,grid.json}: what the table is made from."""
    document = experiment.document
    write_atomic(root / "spec.yaml", dump_yaml(document.raw))
    write_json(
        root / "grid.json",
        {
            "schema_version": 1,
            "name": experiment.name,
            "command": command,
            "source": None if document.path is None else str(document.path),
            "table": experiment.table.dump(),
            "cells": [cell.entry() for cell in experiment.cells],
        },
    )
