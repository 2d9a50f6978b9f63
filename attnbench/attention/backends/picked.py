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

_CPU = torch.device("cpu")  # whatever the default is: compiled code reads what is listed
_KEPT = 1 << 12
"""Positions of all layers whose keys are remembered: each is met by every batch again."""
_NEAR = 1 << 10
"""Positions before this one are remembered with a mark for each key before them, too."""
_AT_ONCE = 8
"""Positions that draw together: the draw is many small operations."""
_LONGEST = 32
"""Lengths of sources up to a multiple of so many draw together."""
_TABLES = 256
"""Such draws that are remembered."""
_LARGEST = 1 << 18
"""A draw of so many keys is no longer remembered; longer sources are drawn at every step."""

_BATCHES = 32
"""Draws of batches that are remembered: those of all layers, for the steps to come."""

Seen = slice | Int[Tensor, "#B #H n"]
"""Keys in the order in which they stand: at even distances and the same for all rows and heads, or listed."""


class Picked(NamedTuple):
    """Some keys of a Memory. there: which places hold one; None: all."""

    keys: Seen
    there: Bool[Tensor, "B H 1 n"] | None = None


class Sources(NamedTuple):
    """The keys of a batch of sources. lengths: of each, how many are real. width: of the batch. valid: which are real,
    where these are not the first ones."""

    lengths: tuple[int, ...]
    width: int
    valid: Bool[Tensor, "B K"] | None


def draws_all(pattern: PatternSpec) -> bool:
    """Whether what it lets see of a source is drawn, and nothing else."""
    if not (pattern.drawn and pattern.sparse and "cross" in pattern.roles):
        return False
    layout = _layout(pattern, 0, 0, torch.ones(1, dtype=torch.int64, device=_CPU))
    return layout is not None and layout.draw is not None and not layout.extent.near and not layout.extent.tokens


def _layout(pattern: PatternSpec, layer: int, seed: int, lengths: Int[Tensor, "B"]) -> Layout | None:
    return pattern.layout("cross", layer, lengths=lengths, seed=seed)


@functools.lru_cache(maxsize=_KEPT)
def of_cache(pattern: PatternSpec, layer: int, seed: int, heads: int, at: int) -> Picked | None:
    """What position `at` of a causal site sees of a cache that is filled up to it; None where it sees nothing, or some
    heads more keys than others. seed: the run's, of a pattern that draws."""
    role: Role = "decoder_self"
    rule = pattern.mask_mod(role, layer, seed=seed) if pattern.drawn else pattern.mask_mod(role, layer)
    if rule is None:
        return Picked(slice(0, at + 1))
    with torch.inference_mode(False):  # that a step with gradients may keep what one without has listed
        positions = Positions(torch.tensor([at], device=_CPU), torch.arange(at + 1, device=_CPU))
        allowed = dense(rule, positions, heads)[0, :, 0].expand(-1, at + 1)
        counts = allowed.sum(1)
        if not counts[0] or bool((counts != counts[0]).any()):
            return None
        keys = allowed.nonzero()[:, 1].view(len(allowed), -1)
        keys = keys[:1].clone() if bool((keys == keys[0]).all()) else keys.contiguous()
    first, *others = keys[0].tolist()
    apart = others[0] - first if others else 1
    even = range(first, (others or [first])[-1] + 1, apart)
    evenly = len(keys) == 1 and [first, *others] == list(even)
    return Picked(slice(even.start, even.stop, apart) if evenly else keys[None])


def kept_of_cache(pattern: PatternSpec, layer: int, at: int) -> Bool[Tensor, "1 1 1 K"]:
    """Which keys of a cache that is filled up to it position `at` of a causal site sees, in all heads."""
    return (_kept_of_cache if at < _NEAR else _kept_of_cache.__wrapped__)(pattern, layer, at)  # pyright: ignore[reportArgumentType] - it is frozen


@functools.lru_cache(maxsize=_KEPT)
def _kept_of_cache(pattern: PatternSpec, layer: int, at: int) -> Bool[Tensor, "1 1 1 K"]:
    rule = pattern.mask_mod("decoder_self", layer)
    assert rule is not None  # it is causal
    with torch.inference_mode(False):
        return dense(rule, Positions(torch.tensor([at], device=_CPU), torch.arange(at + 1, device=_CPU)))


def take(held: Float[Tensor, "B H K E"], keys: Seen) -> Float[Tensor, "B H n E"]:
    """Those keys or their values. A slice is not copied."""
    if isinstance(keys, slice):
        return held[:, :, keys]
    if len(keys) == keys.shape[1] == 1:
        return held.index_select(2, keys[0, 0])
    rows, heads = (torch.arange(count, device=held.device) for count in held.shape[:2])
    return held[rows[:, None, None], heads[:, None], keys]  # whatever the strides, nothing else is read


def sources(rows: int, width: int, valid: Bool[Tensor, "B K"] | None) -> Sources:
    """So many rows of so many keys, all real where nothing else is said."""
    if valid is None:
        return Sources((width,) * rows, width, None)
    holes = bool((valid[:, 1:] > valid[:, :-1]).any())
    return Sources(tuple(valid.sum(1).tolist()), width, valid if holes else None)


def of_sources(pattern: PatternSpec, layer: int, seed: int, heads: int, at: int, given: Sources) -> Picked:
    """What target position `at` sees of each source, for a pattern that draws it all."""
    first = at - at % _AT_ONCE
    drawn = _drawn(pattern, layer, seed, heads, first, given.lengths, given.width)  # pyright: ignore[reportArgumentType] - it is frozen
    if drawn is None:
        first, counts = at, torch.tensor(given.lengths, device=_CPU)
        listed = _in_order(_layout(pattern, layer, seed, counts), heads, at, 1, given.width)
        drawn = _of_lengths(listed, counts, given.width)
    keys, there = drawn[0][at - first], None if drawn[1] is None else drawn[1][at - first]
    if given.valid is not None:
        held = given.valid.gather(1, keys.flatten(1)).view_as(keys)[:, :, None]
        there = held if there is None else there & held
    return Picked(keys, there)


@functools.lru_cache(maxsize=_BATCHES)
def _drawn(
    pattern: PatternSpec, layer: int, seed: int, heads: int, first: int, lengths: tuple[int, ...], width: int
) -> tuple[Int[Tensor, "Q B H n"], Bool[Tensor, "Q B H 1 n"] | None] | None:
    """What the positions from `first` on draw of sources of these lengths, see `_of_lengths`; None where that is more
    than is remembered."""
    with torch.inference_mode(False):
        counts = torch.tensor(lengths, device=_CPU)
        layout = _layout(pattern, layer, seed, counts)
        assert layout is not None  # as `draws_all` has it
        assert layout.draw is not None
        longest = -(-width // _LONGEST) * _LONGEST
        if _AT_ONCE * longest * heads * layout.draw.n >= _LARGEST:
            return None
        table = _table(pattern, layer, seed, heads, first, longest)  # pyright: ignore[reportArgumentType] - it is frozen
        return _of_lengths(table[:, counts.clamp(min=1) - 1].long().permute(1, 2, 0, 3), counts, width)


def _of_lengths(
    listed: Int[Tensor, "B H Q n"], lengths: Int[Tensor, "B"], width: int
) -> tuple[Int[Tensor, "Q B H n"], Bool[Tensor, "Q B H 1 n"] | None]:
    """What positions draw, in the order in which it stands; at the end, where there are fewer than n, others. And which
    places hold a key; None: all."""
    listed = listed.permute(2, 0, 1, 3)
    there = listed < lengths[:, None, None]
    return listed.clamp(max=width - 1).contiguous(), None if bool(there.all()) else there[:, :, :, None]


@functools.lru_cache(maxsize=_TABLES)
def _table(
    pattern: PatternSpec, layer: int, seed: int, heads: int, first: int, longest: int
) -> Int[Tensor, "Q longest H n"]:
    """What the positions from `first` on draw from sources of 1 to `longest` keys."""
    with torch.inference_mode(False):
        layout = _layout(pattern, layer, seed, torch.arange(1, longest + 1, device=_CPU))
        return _in_order(layout, heads, first, _AT_ONCE, longest).permute(2, 0, 1, 3).to(torch.int16).contiguous()


def _in_order(layout: Layout | None, heads: int, first: int, count: int, beyond: int) -> Int[Tensor, "B H Q n"]:
    """The keys that a layout draws for positions from `first` on, `beyond` where there is none."""
    assert layout is not None  # as `draws_all` has it
    assert layout.draw is not None
    keys, there = layout.draw.keys(count, heads, _CPU, first)
    return keys.masked_fill(~there, beyond).sort(-1).values
