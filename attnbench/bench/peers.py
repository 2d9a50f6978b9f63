"""Other packages, timed in the same run where they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from attnbench.core.errors import MissingExtraError, SpecError
from attnbench.core.spec import unknown


class Peer(NamedTuple):
    """transforms: what it calls its own, as functions of scores over the last dimension."""

    package: str
    version: str
    transforms: dict[str, Callable[[Tensor], Tensor]]


def _entmax() -> dict[str, Callable[[Tensor], Tensor]]:
    entmax = importlib.import_module("entmax")
    return {
        "sparsemax": lambda scores: entmax.sparsemax(scores, dim=-1),
        "entmax15": lambda scores: entmax.entmax15(scores, dim=-1),
        "entmax_bisect, alpha = 1.3": lambda scores: entmax.entmax_bisect(scores, alpha=1.3, dim=-1),
    }


_KNOWN: dict[str, Callable[[], dict[str, Callable[[Tensor], Tensor]]]] = {"entmax": _entmax}


def find(names: list[str]) -> list[Peer]:
    """The peers of these names. Raises SpecError for an unknown one, MissingExtraError for one that is not there."""
    found = []
    for name in names:
        if name not in _KNOWN:
            raise SpecError(f"--against: {unknown('package', name, sorted(_KNOWN))}")
        try:
            functions = _KNOWN[name]()
        except ImportError:
            raise MissingExtraError(f"--against {name}: it is not installed; pip install {name}") from None
        found.append(Peer(name, importlib.metadata.version(name), functions))
    return found
