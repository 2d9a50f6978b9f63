"""Every word of one text against every word of its partner, as flat arrays in blocks of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BLOCK = 1 << 20
"""Cells of a block; a row is never cut, so a sentence with more words makes a larger one."""


class Text(NamedTuple):
    """Sentences end to end. ids: [W] int32. lengths: [S] words of each."""

    ids: NDArray[np.int32]
    lengths: Ints


class Block(NamedTuple):
    """Some rows, a row a target word: its first cell is null, the others are the source words in order.

    rows: their numbers in the text. sentence: [R] of each row. n, m: [R] source and target words of the pair.
    j: [R] which target word it is, from 1. starts: [R] where its cells begin.
    """

    rows: slice
    sentence: Ints
    n: Ints
    m: Ints
    j: Ints
    starts: Ints

    @property
    def cells(self) -> int:
        return int(self.starts[-1] + self.n[-1]) + 1

    def spread(self, values: NDArray) -> NDArray:
        """A value a row [R] -> a value a cell [C]."""
        return np.repeat(values, self.n + 1)

    def sums(self, cells: Floats) -> Floats:
        """[C] -> [R]."""
        return np.add.reduceat(cells, self.starts)

    def columns(self, starts: Ints) -> Ints:
        """[C] `starts` in the first cell of each row, and counting on from there."""
        return np.arange(self.cells) + self.spread(starts - self.starts)

    def distance(self, first: int = 1) -> Floats:
        """[C] `|i/n - j/m|`, with i counted from 1 and j from `first`; 0 for null."""
        # over the common denominator, so that words as far to the left as to the right tie exactly
        apart = np.abs(
            self.columns(np.zeros_like(self.n)) * self.spread(self.m) - self.spread((self.j - 1 + first) * self.n)
        )
        distance = apart / self.spread(self.n * self.m)
        distance[self.starts] = 0.0
        return distance

    def diagonal(self, tension: float, distance: Floats) -> Floats:
        """[C] `exp(-tension * distance)`; 0 for null."""
        weights = np.exp(-tension * distance)
        weights[self.starts] = 0.0
        return weights


class Cells:
    """The geometry of sentence pairs; pairs with an empty side have no cells."""

    def __init__(self, sources: Ints, targets: Ints, block: int = BLOCK) -> None:
        """sources, targets: [S] words of each side."""
        self._n = sources
        self._m = np.where(sources > 0, targets, 0)
        self._row_ends = np.cumsum(self._m)
        self._cells = self._m * (self._n + 1)
        self._block = block
        self.rows = int(self._m.sum())
        """Target words that may be linked."""
        self.total = int(self._cells.sum())

    def blocks(self) -> Iterator[Block]:
        for begin, end in pairwise(self._bounds().tolist()):
            yield self._rows(begin, end)

    def _bounds(self) -> Ints:
        ends = np.cumsum(self._cells)
        cuts = np.arange(0, self.total, self._block)
        sentence = np.searchsorted(ends, cuts, side="right")
        before = ends[sentence] - self._cells[sentence]
        first = self._row_ends[sentence] - self._m[sentence]
        rows = first + (cuts - before) // (self._n[sentence] + 1)
        return np.unique(np.append(rows, self.rows))

    def _rows(self, begin: int, end: int) -> Block:
        rows = np.arange(begin, end)
        sentence = np.searchsorted(self._row_ends, rows, side="right")
        n, m = self._n[sentence], self._m[sentence]
        j = rows - (self._row_ends[sentence] - m) + 1
        return Block(slice(begin, end), sentence, n, m, j, np.cumsum(n + 1) - (n + 1))


class PairCells(Cells):
    """The cells of two texts, and which words meet in each."""

    def __init__(self, source: Text, target: Text, columns: int, block: int = BLOCK) -> None:
        """columns: above every id of the target. Ids of the source are above 0, which is null."""
        super().__init__(source.lengths, target.lengths, block)
        self._columns = columns
        ends = np.cumsum(source.lengths)
        self._sources = np.insert(source.ids, ends - source.lengths, 0)
        self._first = ends - source.lengths + np.arange(len(ends))
        self._targets = target.ids[np.repeat(source.lengths > 0, target.lengths)]

    def keys(self, block: Block) -> Ints:
        """[C] `source id * columns + target id`."""
        at = block.columns(self._first[block.sentence])
        return self._sources[at].astype(np.int64) * self._columns + block.spread(self._targets[block.rows])

    def known_keys(self) -> Ints:
        """Every key that occurs, sorted."""
        stack: list[Ints] = []
        for block in self.blocks():
            stack.append(_distinct(self.keys(block)))
            while len(stack) > 1 and 2 * len(stack[-1]) > len(stack[-2]):  # like sizes only: no key is moved often
                stack.append(_distinct(np.concatenate([stack.pop(), stack.pop()])))
        return _distinct(np.concatenate(stack)) if stack else np.empty(0, np.int64)


def _distinct(keys: Ints) -> Ints:
    keys = np.sort(keys)
    return keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys
