"""Draws that need no state: which keys a row draws is decided by a hash of seed, site, layer, head, query and key.

So the draw of a row is the same in training and in a step of decoding, and whatever the padding and the batch.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from attnbench.attention.patterns._fixed import FixedSpec
from attnbench.attention.types import ROLES, MaskMod, Role

_BITS, _WORD = 21, 0xFFFFFFFF  # keys are told apart up to 2 ** _BITS of them
_NEVER = torch.iinfo(torch.int64).max


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
    has fewer keys than n takes all of them.
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
        self.start = _mixed(_mixed(_mixed(torch.tensor(seed & _WORD)) + ROLES.index(role)) + layer)

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        open_to = self._open(b, h, q, k)
        return open_to & (self._lot(h, q, k) <= self._last(b, h, q)) if self.n else open_to & False

    def _open(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        there = k <= q if self.lengths is None else k < self.lengths[b]
        return there if self.outside is None else there & ~self.outside(b, h, q, k)

    def _lot(self, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The smallest are drawn; different for all keys of a row."""
        return _mixed(_mixed(_mixed(self.start.to(q.device) + h) + q) + k) << _BITS | k

    def _last(self, b: Tensor, h: Tensor, q: Tensor) -> Tensor:
        """The n-th smallest lot of each row."""
        count = int(q.max()) + 1 if self.lengths is None else int(self.lengths.max())
        every = torch.arange(max(1, count), device=q.device)
        b, h, q = (each.unsqueeze(-1) for each in (b, h, q))
        lots = torch.where(self._open(b, h, q, every), self._lot(h, q, every), _NEVER)
        return lots.kthvalue(min(self.n, len(every)), -1).values


def _mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits (lowbias32 of Wellons 2018, "Prospecting for Hash Functions")."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
