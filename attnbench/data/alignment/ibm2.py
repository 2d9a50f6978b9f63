"""IBM Model 2 with a log-linear diagonal prior, trained by EM over all word pairs of a corpus at once.

Dyer, Chahuneau & Smith 2013, A Simple, Fast, and Effective Reparameterization of IBM Model 2. A target word comes from
null with probability p0, else from source word i of n with `(1 - p0) exp(-tension |i/n - j/m|) / Z`. Where their tool,
fast_align, is not their paper (see _Shapes), this is the tool.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnbench.data.alignment.cells import BLOCK, Block, Cells, Floats, Ints, PairCells, Text

log = logging.getLogger("attnbench")

Places = NDArray[np.int32] | NDArray[np.int64]

UNKNOWN = 1e-9
"""The probability of a word pair that training never saw, and of all pairs before it."""
_ALPHA = 0.01
_STEPS = 8
_RATE = 20.0
_LOWEST, _HIGHEST = 0.1, 14.0
_KEPT = 1 << 28
"""Cells whose place in the table is remembered between iterations (a gigabyte); beyond, it is looked up each time."""


@dataclass(frozen=True)
class Ibm2Settings:
    """iterations: the last one only decodes, so one less updates. tension: its start. null: p0.

    optimize_tension, variational_bayes: `-o` and `-v` of fast_align, as its authors recommend.
    """

    iterations: int = 5
    tension: float = 4.0
    null: float = 0.08
    optimize_tension: bool = True
    variational_bayes: bool = True

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"training takes at least one iteration, not {self.iterations}")
        if not 0 < self.null < 1:
            raise ValueError(f"the probability of null lies between 0 and 1, not at {self.null}")
        if not self.tension >= 0:
            raise ValueError(f"the tension is at least 0, not {self.tension}")


RECOMMENDED = Ibm2Settings()


class Ibm2(NamedTuple):
    """A trained direction.

    keys: [P] sorted `source id * columns + target id`. probabilities: [P] of that target word, given that source word.
    """

    keys: Ints
    probabilities: Floats
    columns: int
    tension: float
    null: float


def train(
    source: Text,
    target: Text,
    columns: int,
    settings: Ibm2Settings = RECOMMENDED,
    *,
    block: int = BLOCK,
    kept: int = _KEPT,
) -> Ibm2:
    """Learn what target words come from.

    source: ids above 0. target: ids below `columns`. Pairs with an empty side teach nothing.
    block, kept: cells worked on at a time, and cells that may be remembered; they bound the memory and change nothing.
    A function of its arguments alone.
    """
    cells = PairCells(source, target, columns, block)
    keys = cells.known_keys()
    log.info("%s word pairs, %s of them different", f"{cells.total:,}", f"{len(keys):,}")
    shapes = _Shapes(source, target, cells.rows, block)
    model = Ibm2(keys, np.full(len(keys), UNKNOWN), columns, settings.tension, settings.null)
    places = _Places(cells, keys, kept)
    for iteration in range(settings.iterations - 1):
        climbs = settings.optimize_tension and iteration > 0
        counts, distance = _expect(model, places, observe=climbs)
        tension = shapes.climb(model.tension, distance / cells.rows) if climbs and cells.rows else model.tension
        probabilities = _normalize(keys // columns, counts, bayes=settings.variational_bayes)
        model = model._replace(probabilities=probabilities, tension=tension)
        log.info("update %d: tension %.4f", iteration + 1, tension)
    return model


def decode(model: Ibm2, source: Text, target: Text, *, block: int = BLOCK) -> Ints:
    """[W] for each target word the source word it most likely comes from, counted from 0; -1: null.

    Null wins ties, then the first source word. A word of a pair with an empty side comes from null.
    """
    cells = PairCells(source, target, model.columns, block)
    found = np.full(cells.rows, -1, dtype=np.int64)
    for each in cells.blocks():
        keys = cells.keys(each)
        at = _look_up(model.keys, keys)
        known = at < len(model.keys)
        known[known] = model.keys[at[known]] == keys[known]
        chances = np.full(len(keys), UNKNOWN)
        chances[known] = model.probabilities[at[known]]
        joint = _prior(each, model) * chances
        best = np.flatnonzero(joint == each.spread(np.maximum.reduceat(joint, each.starts)))
        row = np.searchsorted(each.starts, best, side="right") - 1
        first = best[np.append(True, row[1:] != row[:-1])]
        found[each.rows] = first - each.starts - 1
    every = np.full(len(target.ids), -1, dtype=np.int64)
    every[np.repeat(source.lengths > 0, target.lengths)] = found
    return every


def _prior(block: Block, model: Ibm2) -> Floats:
    weights = block.diagonal(model.tension, block.distance())
    prior = weights * block.spread((1.0 - model.null) / block.sums(weights))
    prior[block.starts] = model.null
    return prior


def _expect(model: Ibm2, places: _Places, *, observe: bool) -> tuple[Floats, float]:
    """[P] expected counts; with `observe`, also the expected distance from the diagonal, summed over target words."""
    counts = np.zeros(len(model.keys))
    distance = 0.0
    for block, at in places:
        joint = _prior(block, model) * model.probabilities[at]
        posterior = joint / block.spread(block.sums(joint))
        np.add.at(counts, at, posterior)
        if observe:
            distance += float(posterior @ block.distance(first=0))
    return counts, distance


def _normalize(given: Ints, counts: Floats, *, bayes: bool) -> Floats:
    """Counts [P] -> probabilities that sum to one for each `given` (sorted); with `bayes` to less, rare pairs most."""
    if not len(counts):
        return counts
    starts = np.flatnonzero(np.append(True, given[1:] != given[:-1]))
    sizes = np.diff(np.append(starts, len(given)))
    if not bayes:
        return counts / np.repeat(np.add.reduceat(counts, starts), sizes)
    counts = counts + _ALPHA
    return np.exp(_digamma(counts) - np.repeat(_digamma(np.add.reduceat(counts, starts)), sizes))


def _digamma(values: Floats) -> Floats:
    return torch.special.digamma(torch.from_numpy(values)).numpy()


class _Places:
    """The blocks of a corpus, and where their cells stand in the table of word pairs."""

    def __init__(self, cells: PairCells, keys: Ints, kept: int) -> None:
        self._cells = cells
        self._keys = keys
        self._kept: list[Places] | None = [] if cells.total <= kept else None

    def __iter__(self) -> Iterator[tuple[Block, Places]]:
        for number, block in enumerate(self._cells.blocks()):
            if self._kept is None:
                yield block, _look_up(self._keys, self._cells.keys(block))
                continue
            if number == len(self._kept):
                self._kept.append(_look_up(self._keys, self._cells.keys(block)))
            yield block, self._kept[number]


def _look_up(table: Ints, keys: Ints) -> Places:
    """np.searchsorted of many keys in a large table: in their order, which the cache likes."""
    distinct, inverse = np.unique(keys, return_inverse=True)
    places = np.searchsorted(table, distinct)
    return (places.astype(np.int32) if len(table) < 1 << 31 else places)[inverse]


class _Shapes:
    """Gradient ascent of the tension, for which the lengths of the sentences are enough.

    Three things are fast_align's and not the paper's. The distance observed counts j from 0; the distance expected is
    normalised by the Z of n and m exchanged; and what comes from null counts as distance 0 in the first alone. Tensions
    end lower than with the true gradient.
    """

    def __init__(self, source: Text, target: Text, rows: int, block: int) -> None:
        lengths = np.stack([source.lengths, target.lengths])
        shapes, self._times = np.unique(lengths, axis=1, return_counts=True)
        self._cells = Cells(shapes[0], shapes[1], block)
        self._rows = rows

    def climb(self, tension: float, observed: float) -> float:
        """The tension after some steps towards that at which the expected distance a target word is `observed`."""
        for _ in range(_STEPS):
            tension = max(tension, _LOWEST)
            tension = min(max(tension + _RATE * (self._expected(tension) - observed), _LOWEST), _HIGHEST)
        return tension

    def _expected(self, tension: float) -> float:
        total = 0.0
        for block in self._cells.blocks():
            distance = block.distance()
            sums = block.sums(block.diagonal(tension, distance) * distance)
            total += float((sums / _exchanged(block, tension)) @ self._times[block.sentence])
        return total / self._rows


def _exchanged(block: Block, tension: float) -> Floats:
    """[R] `sum_i exp(-tension |i/m - j/n|)` over i = 1..m, or without end where j > n: two geometric series."""
    n, m, j = block.n, block.m, block.j
    ratio = np.exp(-tension / m)
    below = j * m // n
    above = np.where(below > m, np.inf, m - below)
    left = np.exp(-tension * (j / n - below / m)) * (1.0 - ratio**below)
    right = np.exp(-tension * ((below + 1) / m - j / n)) * (1.0 - ratio**above)
    return (left + right) / (1.0 - ratio)
