"""How many target words each source word is linked to: its fertility."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from attnbench.data.alignment.links import Link


def fertilities(alignments: Sequence[Iterable[Link]], lengths: Sequence[int]) -> list[NDArray[np.int64]]:
    """For each pair [S]: the number of target words that each source position is linked to, at least 1.

    alignments: those of the forward direction, for the fertilities of Malaviya et al. 2018. lengths: source words.
    Raises ValueError for a link beyond its sentence, or sides of unequal length.
    """
    found: list[NDArray[np.int64]] = []
    for number, (links, length) in enumerate(zip(alignments, lengths, strict=True)):
        sources = np.array([source for source, _ in set(links)], dtype=np.int64)
        if sources.size and not 0 <= sources.min() <= sources.max() < length:
            raise ValueError(f"alignment {number} has a link beyond the {length} words of its source")
        found.append(np.maximum(np.bincount(sources, minlength=length), 1))
    return found
