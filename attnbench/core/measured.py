"""Figures that are measured once a machine and kept in the cache, so that every process decides alike by them."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from attnbench.core import processor
from attnbench.core.errors import AttnbenchError
from attnbench.core.files import cache_root, write_atomic
from attnbench.core.lock import making

_TRIALS = 3
"""Times that a way is timed anew before it is refused."""
_UNMEASURED = "what is faster here is not measured, and the usual is taken: %s"

_log = logging.getLogger(__name__)


def once(file: str, figure: str, measure: Callable[[], float], of: str = "") -> float | None:
    """The figure that is kept for this processor, torch and number of threads; measured and kept where there is none.

    file: one for each figure. of: what else it depends on, like a version of code. None where the cache cannot be
    written: processes that each measure for themselves might decide differently.
    """
    try:
        path = _path(file, of)
    except AttnbenchError as error:
        _log.info(_UNMEASURED, error)
        return None
    found = _kept(path, figure)
    if found is not None:
        return found
    try:
        with making(path):
            found = _kept(path, figure)  # of a process that was first
            if found is None:
                found = measure()
                known = {"processor": processor.name(), "torch": torch.__version__, figure: found}
                write_atomic(path, json.dumps(known) + "\n")
    except OSError as error:
        _log.info(_UNMEASURED, f"the cache cannot be written: {error}")
        return None
    return found


def kept(file: str, figure: str, of: str = "") -> float | None:
    """The same, but nothing is measured: None where none is kept."""
    try:
        return _kept(_path(file, of), figure)
    except AttnbenchError:
        return None


def gain(ways: Mapping[str, Callable[[], object]], rounds: int, enough: float) -> float:
    """How many times as fast the second of two ways is as the first, by the least times of turns.

    enough: below it the second is refused for good, so that it is timed three times before, and the best is taken:
    others may have had the processor meanwhile.
    """
    best = 0.0
    for _ in range(_TRIALS):
        best = max(best, _in_turns(ways, rounds))
        if best >= enough:
            break
    return best


def _in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> float:
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            least[name] = min(least[name], time.perf_counter() - started)
    first, second = least.values()
    return first / second


def _path(file: str, of: str) -> Path:
    words = [processor.identity(), torch.__version__.encode(), str(torch.get_num_threads()).encode()]
    words += [of.encode()] if of else []
    return cache_root() / "machine" / f"{file}-{hashlib.sha256(b'|'.join(words)).hexdigest()[:16]}.json"


def _kept(path: Path, figure: str) -> float | None:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))[figure])
    except (OSError, ValueError, KeyError, TypeError):  # none, or not a file of ours
        return None
