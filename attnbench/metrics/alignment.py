"""Alignment error rate, of links and of attention weights; attention over pieces as attention over words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Link = tuple[int, int]
"""(source, target), counted from 0."""


class AlignmentScore(NamedTuple):
    """0 to 1; None where nothing is there to divide by. aer: the less, the better."""

    aer: float | None
    precision: float | None
    recall: float | None


def alignment_error_rate(
    alignments: Sequence[Collection[Link]],
    sure: Sequence[Collection[Link]],
    possible: Sequence[Collection[Link]],
) -> AlignmentScore:
    """`1 - (|A & S| + |A & P|) / (|A| + |S|)`, summed over sentence pairs (Och & Ney 2003); P takes in S.

    precision: `|A & P| / |A|`. recall: `|A & S| / |S|`. A link that stands twice counts once.
    Raises ValueError for sides of unequal length.
    """
    _require_equal(alignments, sure, possible)
    links = in_sure = in_possible = every_sure = 0
    for ours, right, maybe in zip(map(set, alignments), map(set, sure), map(set, possible), strict=True):
        links += len(ours)
        every_sure += len(right)
        in_sure += len(ours & right)
        in_possible += len(ours & (right | maybe))
    return _score(links, every_sure, in_sure, in_possible)


def soft_alignment_error_rate(
    weights: Sequence[ArrayLike],
    sure: Sequence[Collection[Link]],
    possible: Sequence[Collection[Link]],
) -> AlignmentScore:
    """The same with weights in place of links, a sum of weights in place of a number of links (SAER, Tu et al. 2016).

    weights: for each pair [T, S], target words by source words.
    Raises ValueError for sides of unequal length, or a link beyond its weights.
    """
    _require_equal(weights, sure, possible)
    links = in_sure = in_possible = 0.0
    every_sure = 0
    for number, (given, right, maybe) in enumerate(zip(weights, map(set, sure), map(set, possible), strict=True)):
        pair = np.asarray(given, dtype=np.float64)
        links += float(pair.sum())
        every_sure += len(right)
        in_sure += _sum_at(pair, right, number)
        in_possible += _sum_at(pair, right | maybe, number)
    return _score(links, every_sure, in_sure, in_possible)


def attention_links(weights: ArrayLike) -> list[Link]:
    """[T, S] weights -> each target word with the source word of its largest weight, the first of equal ones.

    A row of zeros has no link.
    """
    table = np.asarray(weights, dtype=np.float64)
    if table.size == 0:
        return []
    best = table.argmax(-1)
    return sorted((int(best[target]), target) for target in np.flatnonzero(table.max(-1) > 0).tolist())


def word_weights(weights: ArrayLike, source: Sequence[int], target: Sequence[int]) -> NDArray[np.float64]:
    """[target pieces, source pieces] -> [target words, source words].

    Sums over the pieces of a source word, means over those of a target word. source, target: the pieces of each word;
    a word without any gets 0. Raises ValueError where the shape is not that of the pieces.
    """
    table = np.asarray(weights, dtype=np.float64)
    if table.shape != (sum(target), sum(source)):
        raise ValueError(f"weights {table.shape} do not belong to {sum(target)} target and {sum(source)} source pieces")
    columns, rows = _membership(source), _membership(target)
    return rows / np.maximum(rows.sum(1, keepdims=True), 1) @ table @ columns.T


def _membership(pieces: Sequence[int]) -> NDArray[np.float64]:
    """[words, pieces]: 1 where the piece is part of the word."""
    owner = np.repeat(np.arange(len(pieces)), pieces)
    return (np.arange(len(pieces))[:, None] == owner).astype(np.float64)


def _sum_at(table: NDArray[np.float64], links: set[Link], number: int) -> float:
    if not links:
        return 0.0
    source, target = np.array(sorted(links)).T
    if (
        table.ndim != 2
        or target.max() >= table.shape[0]
        or source.max() >= table.shape[1]
        or min(source.min(), target.min()) < 0
    ):
        raise ValueError(f"pair {number}: a link lies beyond its weights {table.shape}")
    return float(table[target, source].sum())


def _score(links: float, sure: int, in_sure: float, in_possible: float) -> AlignmentScore:
    return AlignmentScore(
        aer=1.0 - (in_sure + in_possible) / (links + sure) if links + sure else None,
        precision=in_possible / links if links else None,
        recall=in_sure / sure if sure else None,
    )


def _require_equal(ours: Sequence[object], sure: Sequence[object], possible: Sequence[object]) -> None:
    if not len(ours) == len(sure) == len(possible):
        raise ValueError(
            f"{len(ours)} alignments cannot be scored against {len(sure)} sure and {len(possible)} possible"
        )
