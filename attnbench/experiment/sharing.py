"""Trainings that cells have in common: those that differ in search, timing or scores alone are one, scored twice."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from attnbench.core.errors import SpecError
from attnbench.core.files import folder_atomic, parse_yaml, write_atomic
from attnbench.core.lock import LockedError, locked
from attnbench.core.provenance import changed_members, member_files
from attnbench.core.run_files import CHECKPOINTS, ENVIRONMENT, LOCK, LOG, MECHANISMS, RESULT, SPEC
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import content_sha256
from attnbench.experiment.run import Run
from attnbench.experiment.spec import CellSpec
from attnbench.search.beam import BeamSpec
from attnbench.train.state import checkpoint_steps

log = logging.getLogger("attnbench")

PATIENCE = 600.0
"""Seconds to wait for others that copy the same checkpoints."""


def training_digest(spec: CellSpec) -> str:
    """Equal for cells that train alike: nothing of how they decode at the end, and are scored, is in it."""
    scored = spec.train.validate_bleu  # as train.train_bleu needs
    return spec.replace(task=spec.task.for_training(scored=scored), search=BeamSpec(), timing=None).digest()


def take_training(cell: Cell, run: Run, cache: Path) -> Path | None:
    """Give a run without checkpoints those of a finished cell beside it that trains alike on the same data.

    Returns the folder they are from, None where there is none. Training then goes on from its end, which is no update.
    """
    data = cell.spec.task.prepared(cache)
    if data is None or checkpoint_steps(run.checkpoints):
        return None
    content, wanted = content_sha256(data), training_digest(cell.spec)
    for folder in sorted(run.folder.parent.iterdir()):
        if folder != run.folder and _whole(folder, content, cell.spec) and _training_of(folder) == wanted:
            with suppress(LockedError, OSError), _held(folder):
                if _whole(folder, content, cell.spec):
                    _copy(folder, run)
                    log.info("[%s, seed %d] trains as %s did, and takes its checkpoints", cell.label, cell.seed, folder)
                    return folder
    return None


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The lock of a finished cell. Others that take its checkpoints hold it for as long as they copy."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            with locked(folder / LOCK):
                yield
            return
        except LockedError:
            if time.monotonic() > end:
                raise


def _whole(folder: Path, content: str, spec: CellSpec) -> bool:
    """Whether a cell has ended in the usual way on these data, with the mechanisms' code that is here now, and still
    has the weights that it was scored with."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
        ended = result["outcome"]["kind"] != "diverged" and result["data"]["content_sha256"] == content
        if changed_members(member_files(spec.model, spec.train), result.get(MECHANISMS)):
            return False
        return (
            ended and bool(result["weights"]) and set(result["weights"]) <= set(checkpoint_steps(folder / CHECKPOINTS))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _training_of(folder: Path) -> str | None:
    try:
        raw, _ = parse_yaml((folder / SPEC).read_text(encoding="utf-8"))
        return training_digest(CellSpec.model_validate(raw))
    except (OSError, ValueError, SpecError):
        return None


def _copy(folder: Path, run: Run) -> None:
    """Checkpoints last: without them the rest is no training."""
    borrowed = json.loads((folder / RESULT).read_bytes())["metrics"]["train/seconds"]
    for name in (LOG, ENVIRONMENT):
        if (folder / name).is_file():
            write_atomic(run.folder / name, (folder / name).read_bytes())
    step = checkpoint_steps(folder / CHECKPOINTS)[-1]
    run.log({"step": step, "event": f"trained as {folder.name}", "borrowed_seconds": borrowed})
    with folder_atomic(run.checkpoints) as work:
        shutil.copytree(folder / CHECKPOINTS, work, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """A second name for a file that is never written again; a copy where the disk gives none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
