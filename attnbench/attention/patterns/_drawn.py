"""Draws that need no state: which keys a row draws is decided by a hash of seed, site, layer, head, query and turn.

So the draw of a row is the same in training and in a step of decoding, and whatever the padding and the batch; and its
cost depends on how many keys it draws (each is compared with those before it), not on how many it draws from.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Int
from pydantic import Field
from torch import Tensor

from attnbench.attention.patterns._fixed import FixedSpec
from attnbench.attention.patterns.base import Extent, PatternSpec
from attnbench.attention.types import ROLES, Role
from attnbench.core import native
from attnbench.core.inherit import is_outdated

Hashed = TypeVar("Hashed", int, Tensor)
_WORD = 0xFFFFFFFF
_SOURCE = Path(__file__).with_name("_drawn.cpp")


class _Drawing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ends", "heads", "positions")),
        *((name, ctypes.c_int64) for name in ("rows", "n_heads", "queries", "n", "start", "from", "to", "tokens")),
    )


class DrawnSpec(FixedSpec):
    """A pattern that draws some of its n positions."""

    drawn: ClassVar[bool] = True

    seed: int | None = Field(default=None, ge=0, le=_WORD)
    """Of the draw; left out: the run's."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if is_outdated(cls, "most", "draw"):
            cls.most = PatternSpec.most

    def draw(
        self,
        n: int,
        seed: int,
        role: Role,
        layer: int,
        lengths: Int[Tensor, "B"] | None,
        apart: Extent = Extent(),  # noqa: B008
    ) -> Drawn:
        """n keys a row. seed: the run's. Raises ValueError where nothing says how many keys there are."""
        if role != "decoder_self" and lengths is None:
            raise ValueError(f"the pattern '{self.kind}' draws from the keys that there are: give their lengths")
        return Drawn(n, seed if self.seed is None else self.seed, role, layer, lengths, apart)


class Drawn:
    """Whether a key is among the n that its row draws from the keys that `apart` does not hold.

    lengths: how many keys the rows of the batch have, unread at `decoder_self`, where a query draws from itself and
    what came before. A row that has fewer keys than n takes all of them. apart: rows that see all keys draw none.
    """

    def __init__(
        self,
        n: int,
        seed: int,
        role: Role,
        layer: int,
        lengths: Int[Tensor, "B"] | None = None,
        apart: Extent = Extent(),  # noqa: B008
    ) -> None:
        self.n, self.apart = n, apart
        self.lengths = None if role == "decoder_self" else lengths
        self.start = _mixed(_mixed(_mixed(seed & _WORD) + ROLES.index(role)) + layer)

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        keys, there = self._draw(b, h, q)
        if k.dim() and keys.dim() == k.dim() + 1 and keys.shape[-2] == 1 and _are_all_from_0(k):
            count = k.shape[-1]
            listed = keys.masked_fill(~there, count).clamp(max=count).squeeze(-2)
            marks = k.new_zeros((*listed.shape[:-1], count + 1), dtype=torch.bool)  # one more, for what is not there
            return marks.scatter(-1, listed, True)[..., :count]
        found = torch.zeros((), dtype=torch.bool, device=k.device)
        for turn in range(self.n):
            found = found | ((keys[..., turn] == k) & there[..., turn])
        return found

    def keys(
        self, queries: int, heads: int, device: torch.device, first: int = 0
    ) -> tuple[Int[Tensor, "#B H Q n"], Bool[Tensor, "#B H Q n"]]:
        """The same draw as a list: the keys of each of so many positions from `first` on, and which places hold one."""
        rows = 1 if self.lengths is None else len(self.lengths)
        b, h, q = (torch.arange(count, device=device) for count in (rows, heads, queries))
        keys, there = self._draw(b.view(-1, 1, 1), h.view(1, -1, 1), first + q.view(1, 1, -1))
        shape = (rows, heads, queries, self.n)
        return keys.expand(shape), there.expand(shape)

    def _draw(self, b: Tensor, h: Tensor, q: Tensor) -> tuple[Int[Tensor, "... n"], Bool[Tensor, "... n"]]:
        """What the rows of all these, broadcast, draw. Rows of one length draw the same."""
        ends = None if self.lengths is None else self.lengths.to(q.device)[b]
        if not _is_grid(b, h, q):
            return self._draw_up_to(q + 1 if ends is None else ends, h, q)
        if ends is None:
            return self._draw_grid(None, h, q)
        distinct, which = ends.flatten().unique(return_inverse=True)
        if len(distinct) == len(ends):
            return self._draw_grid(ends, h, q)
        keys, there = self._draw_grid(distinct.view(-1, *ends.shape[1:]), h, q)
        return keys.index_select(0, which), there.index_select(0, which)

    def _draw_grid(
        self, ends: Tensor | None, h: Tensor, q: Tensor
    ) -> tuple[Int[Tensor, "... n"], Bool[Tensor, "... n"]]:
        """Of each row in dimension 0, head in dimension 1 and position in dimension 2, on a processor. ends: one a row;
        None: of each position its own."""
        given = (h, q) if ends is None else (ends, h, q)
        library = native.load(_SOURCE) if native.readable(*given) else None
        if library is None or any(each.dtype != torch.int64 for each in given):
            return self._draw_up_to(q + 1 if ends is None else ends, h, q)
        ends, h, q = (None if ends is None else ends.contiguous()), h.contiguous(), q.contiguous()
        rows, heads, queries = 1 if ends is None else len(ends), h.numel(), q.numel()
        keys = h.new_empty(rows, heads, queries, *(1,) * (q.dim() - 3), self.n)
        there, extent = torch.empty_like(keys, dtype=torch.bool), self.apart
        drawing = _Drawing(
            native.at(ends), native.at(h), native.at(q), rows, heads, queries, self.n, self.start,
            extent.first, extent.last, extent.tokens,
        )  # fmt: skip
        if library.attnbench_draw(ctypes.byref(drawing), native.at(keys), native.at(there), torch.get_num_threads()):
            raise MemoryError("there is no memory left to draw keys with")
        return keys, there

    def _turns(self, count: Tensor) -> int:
        """Those that draw, of rows with so many keys to draw from; all of them on a GPU, which nobody waits for."""
        return min(self.n, int(count.max())) if count.is_cpu and count.numel() else self.n

    def _draw_up_to(self, end: Tensor, h: Tensor, q: Tensor) -> tuple[Int[Tensor, "... n"], Bool[Tensor, "... n"]]:
        """Floyd's method (Bentley and Floyd 1987): turn i draws one of the first c - n + i + 1 of c keys, or the last
        of these where that one was drawn before."""
        extent = self.apart
        first = end.clamp(max=extent.tokens)  # the keys to draw from: from `first` on, and from `after` on up to `end`
        before, after = ((q + edge).clamp(min=first).minimum(end) for edge in (extent.first, extent.last + 1))
        count = (before - first) + (end - after)
        if self.lengths is not None:
            count = count.where(q >= extent.tokens, 0)
        row = _mixed(_mixed(h + self.start) + q)
        fewest = (count - self.n).clamp(min=0)
        place = row.new_zeros(self.n, *torch.broadcast_shapes(row.shape, fewest.shape))
        for turn in range(self._turns(count)):
            last = fewest + turn
            one = _mixed(row + turn) % (last + 1)
            place[turn] = one.where((place[:turn] != one).all(0), last) if turn else one
        place = place.movedim(0, -1)
        there = torch.arange(self.n, device=q.device) < count.unsqueeze(-1)
        near = (before - first).unsqueeze(-1)
        keys = place + torch.where(place < near, first.unsqueeze(-1), after.unsqueeze(-1) - near)
        return keys, there.expand(keys.shape)


def _is_grid(b: Tensor, h: Tensor, q: Tensor) -> bool:
    """Whether these are rows in dimension 0, heads in dimension 1 and positions in dimension 2, on a processor."""
    if not q.is_cpu or not b.dim() == h.dim() == q.dim() >= 3:
        return False
    return all(0 < each.numel() == each.shape[place] for place, each in enumerate((b, h, q)))


def _are_all_from_0(k: Tensor) -> bool:
    """Whether these are all keys in their order, on a processor: then what is drawn need not be compared with each."""
    if not k.is_cpu or k.numel() != k.shape[-1]:
        return False
    return torch.equal(k.flatten(), torch.arange(k.numel(), device=k.device))


def _mixed(x: Hashed) -> Hashed:
    """A hash of 32 bits (lowbias32 of Wellons 2018, "Prospecting for Hash Functions")."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)
