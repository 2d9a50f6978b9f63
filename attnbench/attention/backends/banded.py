"""Attention that visits no keys but those around its pattern's: time and memory linear in length, in plain operations.

Queries are cut into tiles, each of which sees the keys around it; the first positions and what rows draw stand beside
them. The rule of the pattern then masks what a tile sees, and any transform makes weights of it: a key that is left out
has weight 0 in each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnbench.attention.backends._tiles import Cut, around, filled
from attnbench.attention.patterns.base import Draw, Extent, Layout

TILE = 32
"""Queries of a tile, at least."""

_EVEN = 16
"""Neighbours come in multiples of so many, with which products are up to twice as fast (measured: 64 keys, not 63)."""
_DRAWN = 12
"""Keys at hand that a drawn one costs as much as (measured; a drawn key is looked up row by row)."""

Similarity = Callable[[Float[Tensor, "*G Q E"], Float[Tensor, "*G K E"]], Float[Tensor, "*G Q K"]]
"""The score, whatever the dimensions before queries and keys."""
Weigh = Callable[[Float[Tensor, "B H Q K"], Bool[Tensor, "#B #H Q K"]], Float[Tensor, "B H Q K"]]
"""Scores, and the keys that are allowed -> what the values are multiplied by."""


class Asked(NamedTuple):
    """What every group of keys is made from. query: a whole number of tiles, where there are tiles."""

    query: Float[Tensor, "B H Q E"]
    keys: Float[Tensor, "B H K E"]
    values: Float[Tensor, "B H K E2"]
    score: Similarity
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
    valid: Bool[Tensor, "B K"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B H Q E2"]:
    """Context of every query; queries and keys stand at the positions from 0 on.

    A layout with near keys or first positions is one of self-attention: Q = K.
    """
    count, extent = query.shape[2], layout.extent
    asked = Asked(filled(query, _tile(extent)) if extent.near else query, keys, values, score, valid)
    groups: list[Group] = []
    if extent.tokens:
        groups.append(_first_positions(asked, layout))
    if extent.near:
        groups.append(_neighbours(asked, layout))
    if layout.draw is not None:
        groups.append(_drawn(asked, layout.draw))
    weights = weigh(_beside([group.scores for group in groups]), _beside([group.allowed for group in groups]))
    parts = weights.split([group.scores.shape[-1] for group in groups], -1)
    contexts = [group.mix(part) for group, part in zip(groups, parts, strict=True)]
    context = torch.stack(contexts).sum(0) if len(contexts) > 1 else contexts[0]
    if extent.tokens and not causal:
        all_seeing = _of_all_keys(asked._replace(query=query[:, :, : extent.tokens]), weigh)
        return torch.cat([all_seeing, context[:, :, extent.tokens : count]], 2)
    return context[:, :, :count]


def pays_from(layout: Layout) -> int:
    """From how many positions on this takes less time than all scores, forward and backward, on a CPU (measured)."""
    extent, drawn = layout.extent, 0 if layout.draw is None else layout.draw.n
    reached = 0 if extent.block else max(0, -extent.first) + max(0, extent.last)
    visited = (_tile(extent) + reached if extent.near else 0) + extent.tokens + _DRAWN * drawn
    return 2 * visited


def _tile(extent: Extent) -> int:
    """Queries of a tile: whole blocks, or no fewer than the neighbours on either side."""
    if extent.block:
        return -(-TILE // extent.block) * extent.block
    return max(TILE, -extent.first, extent.last)


def _neighbours(asked: Asked, layout: Layout) -> Group:
    extent, length = layout.extent, asked.keys.shape[2]
    size = _tile(extent)
    left, right = (0, 0) if extent.block else (max(0, -extent.first), max(0, extent.last))
    left += min(-(left + right) % _EVEN, size - left)
    cut = Cut(size, left, right)
    keys, values = (around(states, cut) for states in (asked.keys, asked.values))
    tiles = keys.shape[2]
    first = torch.arange(tiles, device=keys.device).view(-1, 1, 1) * size
    q = first + torch.arange(size, device=keys.device).view(1, -1, 1)
    k = first + torch.arange(-left, size + right, device=keys.device).view(1, 1, -1)
    zero = k.new_zeros(())
    there = (k >= extent.tokens) & (k < length)  # the first positions stand in a group of their own
    allowed = (layout.rule(zero, zero, q, k) & there)[None, None]
    if asked.valid is not None:
        allowed = allowed & around(asked.valid[:, None, :, None], cut).transpose(-2, -1)
    query = asked.query.unflatten(2, (tiles, size))
    scores = asked.score(query, keys).flatten(2, 3)
    return Group(
        scores, allowed.flatten(2, 3), lambda weights: (weights.unflatten(2, (tiles, size)) @ values).flatten(2, 3)
    )


def _first_positions(asked: Asked, layout: Layout) -> Group:
    keys, values = (states[:, :, : layout.extent.tokens] for states in (asked.keys, asked.values))
    q = torch.arange(asked.query.shape[2], device=keys.device).view(-1, 1)
    k = torch.arange(keys.shape[2], device=keys.device)
    zero = k.new_zeros(())
    allowed = layout.rule(zero, zero, q, k)[None, None]
    if asked.valid is not None:
        allowed = allowed & asked.valid[:, None, None, : keys.shape[2]]
    return Group(asked.score(asked.query, keys), allowed, lambda weights: weights @ values)


def _drawn(asked: Asked, draw: Draw) -> Group:
    rows, heads, length = asked.keys.shape[:3]
    drawn, there = draw.keys(asked.query.shape[2], heads, asked.keys.device)
    there = there & (drawn < length)  # queries that fill up the last tile may draw beyond the keys
    drawn = drawn.clamp(max=length - 1).expand(rows, -1, -1, -1)
    if asked.valid is not None:
        there = there & asked.valid[:, None, None].expand(*drawn.shape[:3], -1).gather(-1, drawn)
    start = torch.arange(rows * heads, device=drawn.device).view(rows, heads, 1, 1) * length
    places = drawn + start
    keys, values = (_pick(states, places) for states in (asked.keys, asked.values))
    scores = asked.score(asked.query.unsqueeze(3), keys).squeeze(3)
    return Group(scores, there, lambda weights: (weights.unsqueeze(3) @ values).squeeze(3))


def _of_all_keys(asked: Asked, weigh: Weigh) -> Float[Tensor, "B H Q E2"]:
    shape = (1, 1, asked.query.shape[2], asked.keys.shape[2])
    allowed = asked.query.new_ones(shape, dtype=torch.bool)
    if asked.valid is not None:
        allowed = allowed & asked.valid[:, None, None]
    return weigh(asked.score(asked.query, asked.keys), allowed) @ asked.values


def _beside(parts: list[Tensor]) -> Tensor:
    """The parts joined along the keys."""
    if len(parts) == 1:
        return parts[0]
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], -1)


def _pick(states: Float[Tensor, "B H K E"], places: Int[Tensor, "B H Q n"]) -> Float[Tensor, "B H Q n E"]:
    """Rows of all heads by their places, one after the other; an embedding, whose backward adds up whole rows."""
    return nn.functional.embedding(places, states.flatten(0, 2))
