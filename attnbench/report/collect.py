"""Run folders read into plain records: one experiment, its cells, and how far each has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from attnbench.core.errors import AttnbenchError, DataError, SpecError
from attnbench.core.files import parse_yaml, read_json
from attnbench.core.lock import is_locked
from attnbench.core.run_files import (
    CELLS,
    CHECKPOINTS,
    ENVIRONMENT,
    ERROR,
    GRID,
    LOCK,
    MECHANISMS,
    RESULT,
    SPEC,
    cell_folder,
)

Status = Literal["done", "failed", "running", "interrupted", "queued"]
STATUSES: tuple[Status, ...] = get_args(Status)
Scalar = str | int | float | bool | None
_MAKE_AGAIN = "run the command that made it again"
"""What mends a damaged grid.json."""


@dataclass(frozen=True)
class Cell:
    """One cell of a grid as its files show it.

    axes: the value of each axis (path -> label). reason: why it failed, the first line of it. metrics: finite or not,
    every number of result.json. outcome: how its training ended, at least `kind` and `text`, empty where nothing says
    so. weights: the checkpoints that were scored. references: split -> hash of the lines it was scored against.
    shared_seconds: in which other programs used the same cores. spec: the cell's spec.yaml, empty where absent.
    attempts: the environments of its env.json, oldest first. mechanisms: modules of its mechanisms -> hashes of their
    files, empty where the result does not say them.
    """

    label: str
    seed: int
    folder: Path
    digest: str = ""
    axes: Mapping[str, Scalar] = field(default_factory=dict)
    row: Mapping[str, Scalar] = field(default_factory=dict)
    status: Status = "queued"
    reason: str = ""
    outcome: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    signatures: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    references: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    dirty: bool = False
    seconds: float = 0.0
    shared_seconds: float = 0.0
    finished: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    attempts: tuple[Mapping[str, Any], ...] = ()
    mechanisms: Mapping[str, str] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        return self.outcome.get("kind") == "diverged"

    @property
    def scored(self) -> bool:
        """Done, with weights that were scored: a training may diverge before its first checkpoint."""
        return self.status == "done" and not (self.diverged and not self.weights)


@dataclass(frozen=True)
class Experiment:
    """One run folder. table: the table section of its spec. source: the path of the spec as it was given, if any."""

    folder: Path
    name: str
    command: str
    table: Mapping[str, Any]
    source: str | None
    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        """The last part of the name."""
        return self.name.rsplit("/", 1)[-1]


def collect(folder: Path) -> Experiment:
    """The experiment in `folder`, cells in grid order.

    A cell with damaged files is a failed cell with the reason. Raises DataError where there is no grid.json,
    AttnbenchError where it is damaged.
    """
    path = folder / GRID
    if not path.is_file():
        raise DataError(f"{folder} is no run folder: it has no grid.json{_hint(folder)}")
    grid = _object(path, _MAKE_AGAIN)
    try:
        cells = tuple(_cell(folder, entry) for entry in grid["cells"])
        table = grid.get("table") or {}
        if not isinstance(table, Mapping):
            raise TypeError("'table' is no mapping")
        name, source = str(grid["name"]), grid.get("source")
        return Experiment(folder, name, str(grid.get("command") or ""), table, source and str(source), cells)
    except (KeyError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise AttnbenchError(f"{path} is damaged ({what}): {_MAKE_AGAIN}") from None


def _hint(folder: Path) -> str:
    if folder.is_file():
        return " (it is a file; name a folder)"
    if not folder.is_dir():
        return " (there is no such folder)"
    near = sorted(str(path.parent) for path in [*folder.glob(f"*/{GRID}"), *folder.glob(f"*/*/{GRID}")])
    return f"; run folders below it: {', '.join(near[:8])}" if near else ""


def _object(path: Path, mend: str) -> dict[str, Any]:
    try:
        return read_json(path, mend)
    except OSError as error:
        raise AttnbenchError(f"{path} cannot be read ({error.strerror}): check its permissions") from None


def _cell(root: Path, entry: Mapping[str, Any]) -> Cell:
    folder = cell_folder(root, str(entry["folder"]))
    about: dict[str, Any] = {
        "label": str(entry["label"]),
        "seed": int(entry["seed"]),
        "folder": folder,
        "digest": str(entry.get("digest") or ""),
        "axes": dict(entry.get("axes") or {}),
        "row": dict(entry.get("row") or {}),
        "spec": _yaml(folder / SPEC),
        "attempts": _attempts(folder / ENVIRONMENT),
    }
    if folder.is_file():
        reason = f"{CELLS}/{folder.name} is a file where the cell's folder belongs; move it away"
        return Cell(**about, status="failed", reason=reason)
    if not (folder / RESULT).exists():
        return Cell(**about, **_unfinished(folder))
    try:
        return Cell(**about, **_finished(folder / RESULT, about["digest"]))
    except (AttnbenchError, TypeError, ValueError, AttributeError) as error:
        return Cell(**about, status="failed", reason=f"{error}".splitlines()[0])


def _finished(path: Path, digest: str) -> dict[str, Any]:
    try:
        result = _object(path, "delete it and run the cell again")
    except AttnbenchError as error:  # a table names no place of this machine
        raise ValueError(str(error).replace(str(path), RESULT)) from None
    found = str(result.get("digest") or "")
    if digest and found and digest != found:
        raise ValueError(f"{RESULT} belongs to another spec ({found}, not {digest}): delete it and run the cell again")
    metrics = {
        str(name): float(value)
        for name, value in result["metrics"].items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    } if isinstance(result.get("metrics"), dict) else None  # fmt: skip
    if metrics is None:
        raise ValueError(f"{RESULT} has no metrics: delete it and run the cell again")
    return {
        "status": "done",
        "outcome": _outcome(result.get("outcome")),
        "weights": tuple(result.get("weights") or ()),
        "metrics": metrics,
        "signatures": {str(name): str(value) for name, value in (result.get("signatures") or {}).items()},
        "samples": dict(result.get("samples") or {}),
        "references": {str(name): str(value) for name, value in (result.get("references") or {}).items()},
        "data": {str(name): str(value) for name, value in (result.get("data") or {}).items()},
        "mechanisms": {str(name): str(value) for name, value in (result.get(MECHANISMS) or {}).items()},
        "commit": str(result.get("commit") or ""),
        "dirty": bool(result.get("dirty")),
        "seconds": float(result.get("total_seconds") or 0.0),
        "shared_seconds": float(result.get("shared_seconds") or 0.0),
        "finished": str(result.get("finished") or ""),
    }


def _outcome(value: object) -> dict[str, Any]:
    """The outcome of a result; older ones have its text alone."""
    if isinstance(value, Mapping):
        return {"text": "", **{str(key): item for key, item in value.items() if item != ""}}
    if not isinstance(value, str) or not value:
        return {}
    kinds = {"diverged": "diverged", "stopped": "stopped_early"}
    return {"kind": kinds.get(value.split()[0], "finished"), "text": value}


def _unfinished(folder: Path) -> dict[str, Any]:
    if is_locked(folder / LOCK):
        return {"status": "running"}
    error = folder / ERROR
    if error.exists():
        return {"status": "failed", "reason": _first_line(error)}
    if any(folder.glob(f"{CHECKPOINTS}/step-*")):
        return {"status": "interrupted"}
    return {"status": "queued"}


def _first_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    return text.splitlines()[0] if text else "no reason was written down"


def _yaml(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        value, _ = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except (SpecError, OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _attempts(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The environments of an env.json; older ones hold that of the last attempt alone."""
    try:
        content = _object(path, "")
    except AttnbenchError:
        return ()
    attempts = content.get("attempts", [content])
    return tuple(attempt for attempt in attempts if isinstance(attempt, dict)) if isinstance(attempts, list) else ()
