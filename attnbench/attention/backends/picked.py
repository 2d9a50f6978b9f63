"""A step of decoding under a pattern: the keys that its position sees, so that no others are read.

What stands at other keys does not matter, NaN neither.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.attention.patterns.base import Layout, PatternSpec, dense
from attnbench.attention.types import Positions, Role

_KEPT = 1 << 12
"""Positions of all layers whose keys are remembered: each is met by every batch again."""
_AT_ONCE = 8
"""Positions that draw together: the draw is many small operations."""
_LONGEST = 32
"""Lengths of sources up to a multiple of so many draw together."""
_TABLES = 256
"""Such draws that are remembered."""
_LARGEST = 1 << 18
"""A draw of so many keys, of 2 bytes each, is no longer remembered; longer sources are drawn for each batch."""

Seen = slice | Int[Tensor, "#H n"]
"""Keys in the order in which they stand: at even distances and the same for all heads, or listed."""


class Picked(NamedTuple):
    """Some keys of a Memory. there: which places hold one; None: all."""

    keys: Float[Tensor, "B H n E"]
    values: Float[Tensor, "B H n E2"]
    there: Bool[Tensor, "B H 1 n"] | None = None


def draws_all(pattern: PatternSpec) -> bool:
    """Whether what it lets see of a source is drawn, and nothing else."""
    if not (pattern.drawn and pattern.sparse and "cross" in pattern.roles):
        return False
    layout = _layout(pattern, 0, 0, torch.ones(1, dtype=torch.int64))
    return layout is not None and layout.draw is not None and not layout.extent.near and not layout.extent.tokens


def _layout(pattern: PatternSpec, layer: int, seed: int, lengths: Int[Tensor, "B"]) -> Layout | None:
    return pattern.layout("cross", layer, lengths=lengths, seed=seed)


def of_cache(
    pattern: PatternSpec, layer: int, seed: int, at: int, keys: Float[Tensor, "B H K E"], values: Tensor
) -> Picked | None:
    """What position `at` of a causal site sees of a cache that is filled up to it; None where that cannot be listed.

    seed: the run's, of a pattern that draws.
    """
    own = seen(pattern, layer, seed, keys.shape[1], at)  # pyright: ignore[reportArgumentType] - it is frozen
    return None if own is None else Picked(_pick(keys, own), _pick(values, own))


@functools.lru_cache(maxsize=_KEPT)
def seen(pattern: PatternSpec, layer: int, seed: int, heads: int, at: int) -> Seen | None:
    """What position `at` of a causal site sees; None where it sees nothing, or some heads more keys than others."""
    role: Role = "decoder_self"
    rule = pattern.mask_mod(role, layer, seed=seed) if pattern.drawn else pattern.mask_mod(role, layer)
    if rule is None:
        return slice(0, at + 1)
    with torch.inference_mode(False):  # that a step with gradients may keep what one without has listed
        allowed = dense(rule, Positions(torch.tensor([at]), torch.arange(at + 1)), heads)[0, :, 0].expand(-1, at + 1)
        counts = allowed.sum(1)
        if not counts[0] or bool((counts != counts[0]).any()):
            return None
        keys = allowed.nonzero()[:, 1].view(len(allowed), -1)
        if bool((keys == keys[0]).all()):
            keys = keys[:1].clone()
    first, *others = keys[0].tolist()
    apart = others[0] - first if others else 1
    even = range(first, (others or [first])[-1] + 1, apart)
    return slice(even.start, even.stop, apart) if len(keys) == 1 and [first, *others] == list(even) else keys


def _pick(held: Float[Tensor, "B H K E"], keys: Seen) -> Float[Tensor, "B H n E"]:
    """A slice is not copied."""
    if isinstance(keys, slice):
        return held[:, :, keys]
    if len(keys) == 1:
        return held.index_select(2, keys[0])
    return held[:, torch.arange(held.shape[1])[:, None], keys]  # whatever the strides, nothing else is read


def of_sources(
    pattern: PatternSpec, layer: int, seed: int, at: int, keys: Float[Tensor, "B H K E"], values: Tensor,
    valid: Bool[Tensor, "B K"] | None,
) -> Picked:  # fmt: skip
    """What target position `at` sees of each source, for a pattern that draws it all."""
    rows, heads, length = keys.shape[:3]
    lengths = torch.full((rows,), length) if valid is None else valid.sum(1)
    listed = _listed(pattern, layer, seed, heads, at, lengths, length)
    there = listed < lengths[:, None, None]
    listed = listed.clamp(max=length - 1)
    if valid is not None:
        there = there & valid.gather(1, listed.flatten(1)).view_as(there)
    row, head = torch.arange(rows)[:, None, None], torch.arange(heads)[:, None]
    return Picked(keys[row, head, listed], values[row, head, listed], None if bool(there.all()) else there[:, :, None])


def _listed(
    pattern: PatternSpec, layer: int, seed: int, heads: int, at: int, lengths: Int[Tensor, "B"], length: int
) -> Int[Tensor, "B H n"]:
    """The drawn keys in the order in which they stand; at the end, where there are fewer than n, others."""
    layout = _layout(pattern, layer, seed, lengths)
    drawn = 0 if layout is None or layout.draw is None else layout.draw.n
    longest = -(-length // _LONGEST) * _LONGEST
    if _AT_ONCE * longest * heads * drawn >= _LARGEST:
        return _in_order(layout, heads, at, 1, length)[:, :, 0]
    first = at - at % _AT_ONCE
    table = _table(pattern, layer, seed, heads, first, longest)  # pyright: ignore[reportArgumentType] - it is frozen
    return table[at - first].index_select(0, lengths.clamp(min=1) - 1).long()


@functools.lru_cache(maxsize=_TABLES)
def _table(
    pattern: PatternSpec, layer: int, seed: int, heads: int, first: int, longest: int
) -> Int[Tensor, "Q longest H n"]:
    """What the positions from `first` on draw from sources of 1 to `longest` keys."""
    with torch.inference_mode(False):
        layout = _layout(pattern, layer, seed, torch.arange(1, longest + 1))
        return _in_order(layout, heads, first, _AT_ONCE, longest).permute(2, 0, 1, 3).to(torch.int16).contiguous()


def _in_order(layout: Layout | None, heads: int, first: int, count: int, beyond: int) -> Int[Tensor, "B H Q n"]:
    """The keys that a layout draws for positions from `first` on, `beyond` where there is none."""
    assert layout is not None  # as `draws_all` has it
    assert layout.draw is not None
    keys, there = layout.draw.keys(count, heads, torch.device("cpu"), first)
    return keys.masked_fill(~there, beyond).sort(-1).values
