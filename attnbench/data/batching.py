"""Token-bucket batches: an endless shuffled stream for training, and every pair once for evaluation.

An epoch's order is a keyed bijection (order.py), read in pools of about 100 batches; a pool is sorted by length, cut
into batches, and its batches are shuffled. Nothing in memory grows with the corpus, and every place can be jumped to.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnbench.core.seeding import derive
from attnbench.data.base import Batch, Cursor
from attnbench.data.order import Shuffle
from attnbench.data.special import BOS, EOS, PAD
from attnbench.data.store import Gathered, IdLists

_POOL_BATCHES = 100
_EVAL_POOL = 1 << 16

Ints = NDArray[np.int64]


class Ids(NamedTuple):
    """A split as ids. wide_tokens, widest: sum and maximum of the length of each pair's longer side, EOS counted.

    fertility: of each source token, where it is known.
    """

    source: IdLists
    target: IdLists
    wide_tokens: int
    widest: int
    fertility: IdLists | None = None


class Pool:
    """Some pairs, copied out of the files: line numbers `index`, and the ids of each side."""

    def __init__(self, ids: Ids, index: Ints) -> None:
        self.index = index
        self._sides = [side.gather(index) for side in (ids.source, ids.target)]
        self._fertility = None if ids.fertility is None else ids.fertility.gather(index)
        self.source_lengths, self.target_lengths = (side.lengths + 1 for side in self._sides)

    @property
    def widths(self) -> Ints:
        """Length of the longer side of each pair, EOS counted."""
        return np.maximum(self.source_lengths, self.target_lengths)

    def batch(self, rows: Ints) -> Batch:
        """The batch of the pairs at `rows` of this pool."""
        source, source_valid = self._padded(0, rows, front=False)
        target_in, target_valid = self._padded(1, rows, front=True)
        target_out, _ = self._padded(1, rows, front=False)
        index = torch.from_numpy(self.index[rows])
        fertility = None if self._fertility is None else _behind(self._fertility, rows, 1, 0)[0]
        return Batch(source, source_valid, target_in, target_out, target_valid, index, fertility)

    def _padded(self, side: int, rows: Ints, *, front: bool) -> tuple[Tensor, Tensor]:
        """Ids with BOS in front or EOS behind, padded."""
        behind, valid = _behind(self._sides[side], rows, EOS, PAD)
        if not front:
            return behind, valid
        ahead = torch.full_like(behind, PAD)
        ahead[:, 0] = BOS
        words = valid[:, 1:]  # a row has as many words as places but one
        ahead[:, 1:][words] = behind[:, :-1][words]
        return ahead, valid


def _behind(lists: Gathered, rows: Ints, last: int, pad: int) -> tuple[Tensor, Tensor]:
    """The lists at `rows` with `last` behind each, padded; and which places are filled."""
    first, lengths = lists.first[rows], lists.lengths[rows]
    place = np.arange(lengths.max() + 1)[None]
    words = place < lengths[:, None]
    out = np.full(words.shape, pad, np.int64)
    out[words] = lists.ids[(first[:, None] + place)[words]]
    out[np.arange(len(rows)), lengths] = last
    return torch.from_numpy(out), torch.from_numpy(place <= lengths[:, None])


def cut(widths: Ints, tokens: int, rows: int | None = None) -> list[int]:
    """Bounds of batches in rows of these widths: rows * widest <= tokens in each; a wider row stands alone.

    rows: a bound on their number, too.
    """
    most = len(widths) if rows is None else rows
    bounds = [0]
    widest = 0
    for row, width in enumerate(widths.tolist()):
        widest = max(widest, width)
        size = row - bounds[-1] + 1
        if size > 1 and (size * widest > tokens or size > most):
            bounds.append(row)
            widest = width
    return [*bounds, len(widths)] if len(widths) else [0]


def rounded(batch: Batch, longest: int | None = None) -> Batch:
    """The batch with more padding, so that few shapes are left: of the number of rows and of places a side no more than
    the first five and four binary digits are not 0, and sides that are nearly as long are as long. longest: a bound on
    the places."""
    more = _round(len(batch.index), 5) - len(batch.index)
    source, target = (_round(side.shape[1], 4) for side in (batch.source, batch.target_in))
    if 4 * abs(source - target) <= max(source, target):
        source = target = max(source, target)

    def grown(tensor: Tensor, places: int, value: int) -> Tensor:
        beyond = (places if longest is None else min(places, longest)) - tensor.shape[1]
        return nn.functional.pad(tensor, (0, max(0, beyond), 0, more), value=value)

    return Batch(
        grown(batch.source, source, PAD), grown(batch.source_valid, source, False),
        grown(batch.target_in, target, PAD), grown(batch.target_out, target, PAD),
        grown(batch.target_valid, target, False), nn.functional.pad(batch.index, (0, more), value=-1),
        None if batch.fertility is None else grown(batch.fertility, source, 0),
    )  # fmt: skip


def _round(size: int, digits: int) -> int:
    """The least number from `size` on whose binary digits after the first so many are 0."""
    return size + -size % (1 << max(0, size.bit_length() - digits))


class TrainStream:
    """The endless stream of training batches: a function of (seed, epoch, shard).

    tokens: bound on rows * max(S, T) of a batch. shard (i, n): the i-th of n disjoint parts, whose union is the whole.
    A wider pair stands alone.
    """

    def __init__(self, ids: Ids, seed: int, *, tokens: int, shard: tuple[int, int] = (0, 1)) -> None:
        self._shard, self._shards = shard
        if not 0 <= self._shard < self._shards:
            raise ValueError(f"shard {shard} is not one of 0..{self._shards - 1}")
        self._ids = ids
        self._seed = seed
        self._tokens = tokens
        self._size = len(ids.source)
        self.pools = max(1, round(ids.wide_tokens / (_POOL_BATCHES * tokens)))
        """Pools of an epoch."""

    def batches(self, start: Cursor = Cursor()) -> Iterator[tuple[Cursor, Batch]]:  # noqa: B008
        """(cursor, batch), for ever; the cursor is where the next batch begins."""
        epoch, number, skip = start
        while True:
            pool, rows = self._pool(epoch, number)
            after = self._after(epoch, number)
            # which shard begins turns about, or the first ones would get more batches of every pool and epoch
            begins = number + epoch
            own = [turn for turn in range(skip, len(rows)) if (turn + begins) % self._shards == self._shard]
            following = [Cursor(epoch, number, turn) for turn in own[1:]] + [after]
            for turn, cursor in zip(own, following, strict=False):
                yield cursor, pool.batch(rows[turn])
            epoch, number, skip = after

    def _after(self, epoch: int, pool: int) -> Cursor:
        return Cursor(epoch, pool + 1) if pool + 1 < self.pools else Cursor(epoch + 1)

    def _pool(self, epoch: int, number: int) -> tuple[Pool, list[Ints]]:
        """A pool and the rows of its batches, in the order they are trained on."""
        first, end = (place * self._size // self.pools for place in (number, number + 1))
        order = Shuffle(self._size, derive(self._seed, "order", epoch))
        pool = Pool(self._ids, order(np.arange(first, end)))
        rows = np.lexsort((pool.source_lengths, pool.widths))
        bounds = cut(pool.widths[rows], self._tokens)
        turns = Shuffle(len(bounds) - 1, derive(self._seed, "batches", epoch, number))
        return pool, [rows[bounds[i] : bounds[i + 1]] for i in turns(np.arange(len(bounds) - 1)).tolist()]


def eval_batches(ids: Ids, *, tokens: int, rows: int | None = None, lines: Ints | None = None) -> Iterator[Batch]:
    """Every pair once, sorted by source length (in blocks of 65,536 pairs), ties in file order.

    tokens: bound on rows * max(S, T) of a batch; a longer pair stands alone. rows: bound on the pairs of a batch.
    lines: the pairs at these lines alone.
    """
    chosen = np.arange(len(ids.source)) if lines is None else lines
    for first in range(0, len(chosen), _EVAL_POOL):
        pool = Pool(ids, chosen[first : first + _EVAL_POOL])
        order = np.argsort(pool.source_lengths, kind="stable")
        bounds = cut(pool.widths[order], tokens, rows)
        for begin, end in pairwise(bounds):
            yield pool.batch(order[begin:end])
