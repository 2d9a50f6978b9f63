"""What a fertility learns of aligned text before its model is trained: learned once for all cells alike, then kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save

from attnbench.core.errors import AttnbenchError, first_line
from attnbench.core.files import write_atomic
from attnbench.core.memory import is_passing
from attnbench.data.fertility import VERSION as ALIGNED
from attnbench.data.fertility import make_once
from attnbench.data.prepare import require_same
from attnbench.models.fertility.base import Fertility, Lessons

log = logging.getLogger("attnbench")

VERSION = 2
"""Part of the names under which results are kept: another number where the same lessons teach something else."""


def teach(
    fertility: Fertility,
    folder: Path,
    manifest: Mapping[str, Any],
    seed: int,
    lessons: Callable[[], tuple[Lessons, Lessons]],
) -> None:
    """Teach it, or give it what one of the same spec and seed has learned of the prepared data in `folder`.

    manifest: of the data that are in use. lessons: those of training and of validation; called where they are needed.
    Raises DataError where nothing can be kept, or the data in `folder` are no longer those, AttnbenchError for a
    damaged file.
    """
    require_same(folder, manifest)
    path = folder / f"lessons-{_digest(fertility, seed)}.safetensors"
    learned = False

    def learn() -> None:
        nonlocal learned
        fertility.learn(*lessons(), seed)
        require_same(folder, manifest)
        write_atomic(path, save({name: tensor.contiguous() for name, tensor in fertility.state_dict().items()}))
        learned = True

    make_once(path, learn)
    if learned:
        return
    try:
        fertility.load_state_dict(load_file(path))
    except Exception as error:  # safetensors raises its own type, which has no stable home
        if is_passing(error):
            raise
        raise AttnbenchError(f"{path}: cannot be read ({first_line(error)}); remove it and run again") from None
    log.info("the fertility '%s' has been learned before, and is kept in %s", fertility.spec.kind, path)


def _digest(fertility: Fertility, seed: int) -> str:
    text = f"{fertility.spec.digest()} {seed} {ALIGNED} {VERSION}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
