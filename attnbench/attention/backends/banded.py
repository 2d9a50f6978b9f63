"""Attention that visits no keys but those around its pattern's: time and memory linear in length.

Where compiled code serves (sampled.py), the keys of each query are read one by one. Elsewhere, and for blocks and wide
windows, queries are cut into tiles, each of which sees the keys around it; the first positions and what rows draw stand
beside them. The rule of the pattern then masks what is seen, and any transform makes weights of it: a key that is left
out has weight 0 in each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnbench.attention.backends import sampled
from attnbench.attention.backends._tiles import Cut, around, filled
from attnbench.attention.patterns.base import Draw, Extent, Layout

TILE = 32
"""Queries of a tile, at least."""

_EVEN = 16
"""Neighbours come in multiples of so many, with which products are up to twice as fast (measured: 64 keys, not 63)."""

_MOST = 128
"""Keys around a query, or a sixth as many first positions, up to which it takes less time to read them one by one than
to multiply tiles with them (measured); what is drawn beside them never takes less in tiles."""

Similarity = Callable[[Float[Tensor, "*G Q E"], Float[Tensor, "*G K E"]], Float[Tensor, "*G Q K"]]
"""The score, whatever the dimensions before queries and keys."""
Weigh = Callable[[Float[Tensor, "B H Q K"], Bool[Tensor, "#B #H #Q K"]], Float[Tensor, "B H Q K"]]
"""Scores, and the keys that are allowed -> what the values are multiplied by."""


class Asked(NamedTuple):
    """What every group of keys is made from. query: a whole number of tiles, where there are tiles. dots: the score is
    their product."""

    query: Float[Tensor, "B H Q E"]
    keys: Float[Tensor, "B H K E"]
    values: Float[Tensor, "B H K E2"]
    score: Similarity
    dots: bool
    valid: Bool[Tensor, "B K"] | None


class Group(NamedTuple):
    """Some of the keys that each query sees: w places a query, of which `allowed` hold a key of its pattern."""

    scores: Float[Tensor, "B H Q w"]
    allowed: Bool[Tensor, "#B #H Q w"]
    mix: Callable[[Float[Tensor, "B H Q w"]], Float[Tensor, "B H Q E2"]]


def attend(
    query: Float[Tensor, "B H Q E"],
    keys: Float[Tensor, "B H K E"],
    values: Float[Tensor, "B H K E2"],
    *,
    score: Similarity,
    weigh: Weigh,
    layout: Layout,
    scale: float | None = None,
    valid: Bool[Tensor, "B K"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B H Q E2"]:
    """Context of every query; queries and keys stand at the positions from 0 on.

    A layout with near keys or first positions is one of self-attention: Q = K. scale: the score is the dot product
    times this.
    """
    count, extent = query.shape[2], layout.extent
    if scale is not None:
        query, score = query if scale == 1 else query * scale, _dots
    asked = Asked(query, keys, values, score, scale is not None, valid)
    if _is_listed(layout) and asked.dots and sampled.serves(query, keys, values):
        return _by_lists(asked, layout, weigh, 0 if causal else min(extent.tokens, count))
    groups = _groups(asked, layout)
    weights = weigh(_beside([group.scores for group in groups]), _beside([group.allowed for group in groups]))
    parts = weights.split([group.scores.shape[-1] for group in groups], -1)
    context = functools.reduce(torch.add, (group.mix(part) for group, part in zip(groups, parts, strict=True)))
    context = context[:, :, :count]
    if extent.tokens and not causal:
        context[:, :, : extent.tokens] = _of_all_keys(asked._replace(query=query[:, :, : extent.tokens]), weigh)
    return context


def pays_from(layout: Layout, *, causal: bool, listed: bool) -> int:
    """From how many positions on this takes less time than all scores, forward and backward, on a CPU (measured).
    listed: compiled code reads the keys of each query one by one, where that takes less than tiles do."""
    extent, drawn = layout.extent, 0 if layout.draw is None else layout.draw.n
    if listed and _is_listed(layout):
        visited = 2 * _span(extent) + 3 * extent.tokens + 4 * drawn
        return 16 + visited + (24 if extent.tokens and not causal else 0)
    near = (9 * (_cut(extent).size + _span(extent)) // 4 if extent.near else 0) + (0 if extent.block else 32)
    return near + 9 * extent.tokens // 4 + (32 if extent.tokens and not causal else 0) + 50 * drawn


def _span(extent: Extent) -> int:
    """How many positions around a query its keys lie in; none but its own block where there are blocks."""
    return max(0, extent.last - extent.first + 1) if not extent.block else 0


def _is_listed(layout: Layout) -> bool:
    few = _span(layout.extent) + 6 * layout.extent.tokens <= _MOST
    return not layout.extent.block and (few or layout.draw is not None)


def _groups(asked: Asked, layout: Layout) -> list[Group]:
    groups: list[Group] = []
    extent = layout.extent
    if extent.near:
        cut = _cut(extent)
        asked = asked._replace(query=filled(asked.query, cut.size))
        near, near_values = (around(each, cut, extent.tokens) for each in (asked.keys, asked.values))
        first, first_values = near[1], near_values[1]
        groups.append(_neighbours(asked, layout, cut, near[0], near_values[0]))
    else:
        first, first_values = (each[:, :, : extent.tokens] for each in (asked.keys, asked.values))
    if extent.tokens:  # in the order in which they stand, for transforms that ask for it
        groups.insert(0, _first_positions(asked, layout, first, first_values))
    if layout.draw is not None:
        groups.append(_drawn(asked, layout.draw))
    return groups


def _cut(extent: Extent) -> Cut:
    """Queries of a tile: whole blocks, or no fewer than the neighbours on either side, a multiple of them in all."""
    if extent.block:
        return Cut(-(-TILE // extent.block) * extent.block)
    left, right = max(0, -extent.first), max(0, extent.last)
    size = max(TILE, left, right)
    return Cut(size, left + min(-(left + right) % _EVEN, size - left), right)


def _neighbours(asked: Asked, layout: Layout, cut: Cut, keys: Tensor, values: Tensor) -> Group:
    extent, length = layout.extent, asked.keys.shape[2]
    size, left, right = cut
    tiles = keys.shape[2]
    first = torch.arange(tiles, device=keys.device).view(-1, 1, 1) * size
    q = first + torch.arange(size, device=keys.device).view(1, -1, 1)
    k = first + torch.arange(-left, size + right, device=keys.device).view(1, 1, -1)
    zero = k.new_zeros(())
    there = (k >= extent.tokens) & (k < length)  # the first positions stand in a group of their own
    allowed = (layout.rule(zero, zero, q, k) & there)[None, None]
    if asked.valid is not None:
        allowed = allowed & around(asked.valid[:, None, :, None], cut)[0].transpose(-2, -1)
    query = asked.query.unflatten(2, (tiles, size))
    scores = asked.score(query, keys).flatten(2, 3)
    return Group(
        scores, allowed.flatten(2, 3), lambda weights: (weights.unflatten(2, (tiles, size)) @ values).flatten(2, 3)
    )


def _first_positions(asked: Asked, layout: Layout, keys: Tensor, values: Tensor) -> Group:
    allowed = _allows_first(asked, layout, keys.shape[2])
    return Group(asked.score(asked.query, keys), allowed, lambda weights: weights @ values)


def _allows_first(asked: Asked, layout: Layout, count: int) -> Bool[Tensor, "#B 1 Q n"]:
    """Which of the first positions each query sees."""
    device = asked.keys.device
    q, k = torch.arange(asked.query.shape[2], device=device).view(-1, 1), torch.arange(count, device=device)
    zero = k.new_zeros(())
    allowed = layout.rule(zero, zero, q, k)[None, None]
    return allowed if asked.valid is None else allowed & asked.valid[:, None, None, :count]


def _drawn(asked: Asked, draw: Draw) -> Group:
    rows, heads, length = asked.keys.shape[:3]
    drawn, there = _keys_of(asked, draw)
    start = torch.arange(rows * heads, device=drawn.device).view(rows, heads, 1, 1) * length
    places = drawn + start
    keys, values = (_pick(states, places) for states in (asked.keys, asked.values))
    scores = asked.score(asked.query.unsqueeze(3), keys).squeeze(3)
    return Group(scores, there, lambda weights: (weights.unsqueeze(3) @ values).squeeze(3))


def _by_lists(asked: Asked, layout: Layout, weigh: Weigh, all_seeing: int) -> Float[Tensor, "B H Q E2"]:
    """The contexts where the keys of each query are read one by one. all_seeing: so many of the first see all."""
    keys, there = _listed(asked, layout)
    scores, of_all = sampled.compare(asked.query, asked.keys, keys, all_seeing)
    weights = weigh(scores, there)
    if all_seeing:
        of_all = weigh(of_all, _all_keys(asked))
    return sampled.blend(weights, of_all, asked.values, keys).to(asked.values.dtype)


def _listed(asked: Asked, layout: Layout) -> tuple[Int[Tensor, "#B #H Q n"], Bool[Tensor, "#B #H Q n"]]:
    """All keys of a pattern, in the order in which they stand but for those that are drawn, and which of them there
    are."""
    extent, length, device = layout.extent, asked.keys.shape[2], asked.keys.device
    q = torch.arange(asked.query.shape[2], device=device).view(-1, 1)
    first = torch.arange(min(extent.tokens, length), device=device).expand(len(q), -1)
    start, end = max(extent.first, 1 - length), min(extent.last, length - 1)
    near, zero = q + torch.arange(start, max(start, end + 1), device=device), q.new_zeros(())
    inside = (near >= extent.tokens) & (near < length)
    keys = torch.cat([first, near.clamp(0, length - 1)], 1)[None, None].int()
    there = layout.rule(zero, zero, q, keys) & torch.cat([torch.ones_like(first, dtype=torch.bool), inside], 1)
    if asked.valid is not None:
        there = there & asked.valid[:, keys[0]]
    if layout.draw is not None:
        drawn, drawn_there = _keys_of(asked, layout.draw)
        keys, there = _beside([keys, drawn.int()]), _beside([there, drawn_there])
    return keys, there


def _keys_of(asked: Asked, draw: Draw) -> tuple[Int[Tensor, "#B H Q n"], Bool[Tensor, "#B H Q n"]]:
    """What is drawn, and which of it there is."""
    rows, heads, length = asked.keys.shape[:3]
    drawn, there = draw.keys(asked.query.shape[2], heads, asked.keys.device)
    there = there & (drawn >= 0) & (drawn < length)  # queries that fill up the last tile may draw beyond the keys
    drawn = drawn.clamp(0, length - 1)
    if asked.valid is not None:
        drawn = drawn.expand(rows, -1, -1, -1)
        there = there & asked.valid[:, None, None].expand(*drawn.shape[:3], -1).gather(-1, drawn)
    return drawn, there


def _of_all_keys(asked: Asked, weigh: Weigh) -> Float[Tensor, "B H Q E2"]:
    return weigh(asked.score(asked.query, asked.keys), _all_keys(asked)) @ asked.values


def _all_keys(asked: Asked) -> Bool[Tensor, "#B 1 1 K"]:
    if asked.valid is not None:
        return asked.valid[:, None, None]
    return torch.ones(1, 1, 1, asked.keys.shape[2], dtype=torch.bool, device=asked.keys.device)


def _dots(query: Float[Tensor, "*G Q E"], keys: Float[Tensor, "*G K E"]) -> Float[Tensor, "*G Q K"]:
    with torch.autocast(query.device.type, enabled=False):
        return query @ keys.transpose(-2, -1)


def _beside(parts: list[Tensor]) -> Tensor:
    """The parts joined along the keys."""
    if len(parts) == 1:
        return parts[0]
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)


def _pick(states: Float[Tensor, "B H K E"], places: Int[Tensor, "B H Q n"]) -> Float[Tensor, "B H Q n E"]:
    """Rows of all heads by their places, one after the other; an embedding, whose backward adds up whole rows."""
    return nn.functional.embedding(places, states.flatten(0, 2))
