"""Is the source covered once? REP counts what an output says too often, DROP which source words it leaves out.

Both are of Malaviya et al. 2018, in the reading of their code: 100 times a sum over sentences divided by another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int

REPEATED_BIGRAM = 1
"""Weight of a bigram that comes at least twice, each time that it comes more often than in the reference."""
DOUBLED_WORD = 2
"""Weight of a word that follows itself, each time that it does more often than in the reference."""

Links = Iterable[tuple[int, int]]
"""(source position, target position) of words that translate each other."""


def repetitions(hypotheses: Sequence[str], references: Sequence[str]) -> Int[np.ndarray, "lines 2"]:
    """Of each line: what the output repeats beyond its reference, weighted; and the words of the reference.

    `sum_{g: c(g) >= 2} max(0, c(g) - c_ref(g)) + 2 sum_w max(0, c(ww) - c_ref(ww))`, g the bigrams of words between
    spaces. Raises ValueError for sides of unequal length.
    """
    counts = []
    for line, reference in zip(hypotheses, references, strict=True):
        words = reference.split()
        found, wanted = Counter(pairwise(line.split())), Counter(pairwise(words))
        more = {bigram: max(0, count - wanted[bigram]) for bigram, count in found.items()}
        repeated = sum(more[bigram] for bigram, count in found.items() if count >= 2)
        doubled = sum(extra for (first, second), extra in more.items() if first == second)
        counts.append((REPEATED_BIGRAM * repeated + DOUBLED_WORD * doubled, len(words)))
    return np.array(counts, dtype=np.int64).reshape(-1, 2)


def droppings(to_hypothesis: Sequence[Links], to_reference: Sequence[Links]) -> Int[np.ndarray, "lines 2"]:
    """Of each sentence: source positions linked to the reference and to nothing in the output; those linked to the
    reference.

    Raises ValueError for sides of unequal length.
    """
    counts = []
    for links, wanted in zip(to_hypothesis, to_reference, strict=True):
        covered, needed = {source for source, _ in links}, {source for source, _ in wanted}
        counts.append((len(needed - covered), len(needed)))
    return np.array(counts, dtype=np.int64).reshape(-1, 2)


def share(counts: Int[np.ndarray, "lines 2"]) -> float | None:
    """100 times the sum of the first column over that of the second: REP or DROP of a corpus. None for nothing."""
    part, whole = counts.sum(0).tolist()
    return 100 * part / whole if whole else None
