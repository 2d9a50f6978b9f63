"""What the files of a run are called: a table's in runs/<name>, a cell's in runs/<name>/cells/<its folder>; and
the reader of the one that several floors read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPEC = "spec.yaml"
"""As it was given in a table's folder, resolved in a cell's."""
GRID = "grid.json"
CELLS = "cells"
TESTS = "significance.json"
"""What is remembered of paired tests, under hashes of the lines that were tested (report/significance.py)."""

RESULT = "result.json"
"""Written last: a cell that has it is done."""
MECHANISMS = "mechanisms"
"""Under this name a result, and the note beside a cell's checkpoints, holds the hashes of its mechanisms' files."""
LOG = "metrics.jsonl"
ENVIRONMENT = "env.json"
REFERENCES = "ref.txt"
"""Ending of the lines that the outputs beside them are compared with."""
OUTPUTS = "hyps"
CHECKPOINTS = "checkpoints"
ERROR, TRACEBACK = "error.txt", "traceback.txt"
LOCK = "lock"

WHOLE_CELL = "cell"
"""In specs and grid.json: the axis whose entries may change any part of a cell."""


def cell_folder(root: Path, name: str) -> Path:
    """The folder of the cell called `name` in the table's folder `root`."""
    return root / CELLS / name


def read_tests(path: Path) -> dict[str, float]:
    """What a significance.json remembers, p of each; nothing where it is absent or damaged: tests can be made again."""
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict) or not all(map(_is_p, kept.values())):
        return {}
    return {key: float(p) for key, p in kept.items()}


def _is_p(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
