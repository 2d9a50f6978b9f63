"""How many target words a source word is linked to (fertility), by position and by word type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from attnbench.data.alignment.links import Link, words


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


def type_fertilities(sources: Sequence[str], counts: Sequence[NDArray[np.int64]]) -> dict[str, int]:
    """For each source word type the largest fertility seen; who meets a type not in here takes 1.

    sources: tokenised lines. counts: see fertilities().
    Raises ValueError where a line has not as many words as counts.
    """
    largest: dict[str, int] = {}
    for line, numbers in zip(sources, counts, strict=True):
        for word, number in zip(words(line), numbers.tolist(), strict=True):
            largest[word] = max(number, largest.get(word, 1))
    return largest
