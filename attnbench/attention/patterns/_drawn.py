"""Draws that need no state: which keys a row draws is decided by a hash of seed, site, layer, head, query and key.

So the draw of a row is the same in training and in a step of decoding, and whatever the padding and the batch.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Int
from pydantic import Field
from torch import Tensor

from attnbench.attention.patterns._fixed import FixedSpec
from attnbench.attention.types import ROLES, MaskMod, Role

Hashed = TypeVar("Hashed", int, Tensor)
_BITS, _WORD = 21, 0xFFFFFFFF  # keys are told apart up to 2 ** _BITS of them
_NEVER = torch.iinfo(torch.int64).max
_KEPT = 1 << 28
"""Bytes of tables of draws that are kept (one of 512 keys, 8 heads and 8 draws takes 131 KB)."""
_LEAST = 64
"""Rows of a table at least; from there on powers of two, so that inputs of a similar length share them."""
_AT_ONCE = 1 << 22
"""Lots that are compared at a time."""


class DrawnSpec(FixedSpec):
    """A pattern that draws some of its n positions."""

    drawn: ClassVar[bool] = True

    seed: int | None = Field(default=None, ge=0)
    """Of the draw; left out: the run's."""

    def draw(
        self,
        n: int,
        seed: int,
        role: Role,
        layer: int,
        lengths: Int[Tensor, "B"] | None,
        outside: MaskMod | None = None,
    ) -> Drawn:
        """n keys a row. seed: the run's. Raises ValueError where nothing says how many keys there are."""
        if role != "decoder_self" and lengths is None:
            raise ValueError(f"the pattern '{self.kind}' draws from the keys that there are: give their lengths")
        return Drawn(n, seed if self.seed is None else self.seed, role, layer, lengths, outside)


class Drawn:
    """Whether a key is among the n that its row draws from the keys that `outside` does not hold.

    A rule for plain tensors: it looks at the largest query, which a compiled kernel cannot. lengths: how many keys the
    rows of the batch have, unread at `decoder_self`, where a query draws from itself and what came before. A row that
    has fewer keys than n takes all of them. outside: hashable, for what is kept of a draw.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        role: Role,
        layer: int,
        lengths: Int[Tensor, "B"] | None = None,
        outside: MaskMod | None = None,
    ) -> None:
        self.n, self.outside = n, outside
        self.lengths = None if role == "decoder_self" else lengths
        self.start = _mixed(_mixed(_mixed(seed & _WORD) + ROLES.index(role)) + layer)

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        open_to = self._open(b, h, q, k)
        return open_to & (self._lot(h, q, k) <= self._last(b, h, q)) if self.n else open_to & False

    def _open(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        there = k <= q if self.lengths is None else k < self.lengths[b]
        return there if self.outside is None else there & ~self.outside(b, h, q, k)

    def _lot(self, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return _lot(self.start, h, q, k)

    def _last(self, b: Tensor, h: Tensor, q: Tensor) -> Tensor:
        """The n-th smallest lot of each row."""
        count = int(q.max()) + 1 if self.lengths is None else int(self.lengths.max())
        every = torch.arange(max(1, count), device=q.device)
        b, h, q = (each.unsqueeze(-1) for each in (b, h, q))
        lots = torch.where(self._open(b, h, q, every), self._lot(h, q, every), _NEVER)
        return lots.kthvalue(min(self.n, len(every)), -1).values

    def keys(
        self, queries: int, heads: int, device: torch.device
    ) -> tuple[Int[Tensor, "#B H Q n"], Bool[Tensor, "#B H Q n"]]:
        """The same draw as a list: the keys of each of the first `queries` positions, and which places hold one.

        Drawn once for each length of a row, at a cost that is quadratic in it; then kept.
        """
        rows = max(_LEAST, 1 << (queries - 1).bit_length())
        lengths = [None] if self.lengths is None else self.lengths.tolist()
        tables = {each: self._table(heads, rows, each, device) for each in dict.fromkeys(lengths)}
        drawn = torch.stack([tables[each][:, :queries] for each in lengths]).long()
        return drawn.clamp(min=0), drawn >= 0

    def _table(self, heads: int, queries: int, length: int | None, device: torch.device) -> Int[Tensor, "H Q n"]:
        key = (self.start, self.n, heads, queries, length, self.outside, device)
        table = _tables.pop(key, None)
        if table is None:
            table = _draw(self.start, self.n, heads, queries, length, self.outside, device)
        _tables[key] = table  # the newest last
        while sum(each.nbytes for each in _tables.values()) > _KEPT and len(_tables) > 1:
            del _tables[next(iter(_tables))]
        return table


_tables: dict[tuple[Any, ...], Tensor] = {}


def _draw(
    start: int, n: int, heads: int, queries: int, length: int | None, outside: MaskMod | None, device: torch.device
) -> Int[Tensor, "H Q n"]:
    """What each query draws of `length` keys, or of itself and what came before; -1: no key is left."""
    drawn = torch.full((heads, queries, n), -1, dtype=torch.int32, device=device)
    every = torch.arange(queries if length is None else length, device=device)
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    for query in torch.arange(queries, device=device).split(max(1, _AT_ONCE // (heads * max(1, len(every))))):
        q = query.view(1, -1, 1)
        lots = _lot(start, head, q, every)
        if length is None:
            lots = lots.masked_fill(every > q, _NEVER)
        if outside is not None:
            lots = lots.masked_fill(outside(head, head, q, every), _NEVER)
        best = lots.topk(min(n, len(every)), -1, largest=False).values
        found = torch.where(best == _NEVER, -1, best & ((1 << _BITS) - 1))
        drawn[:, query, : best.shape[-1]] = found.to(drawn.dtype)
    return drawn


def _lot(start: int, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The smallest are drawn; different for all keys of a row."""
    return _mixed(_mixed(_mixed(h + start) + q) + k) << _BITS | k


def _mixed(x: Hashed) -> Hashed:
    """A hash of 32 bits (lowbias32 of Wellons 2018, "Prospecting for Hash Functions")."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
