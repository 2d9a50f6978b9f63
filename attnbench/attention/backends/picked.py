"""A step of decoding under a pattern: the keys that its position sees, so that no others are read."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbench.attention.patterns.base import PatternSpec, dense
from attnbench.attention.types import Positions

_KEPT = 1 << 14
"""Positions of all layers whose keys are remembered: each is met by every batch again."""

Seen = slice | Int[Tensor, "#H n"]
"""Keys in the order in which they stand: at even distances and the same for all heads, or listed."""


def hashable(pattern: PatternSpec) -> bool:
    """Whether `seen` can remember it: a field that holds a list cannot be looked up."""
    try:
        hash(pattern)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=_KEPT)
def seen(pattern: PatternSpec, layer: int, seed: int, heads: int, at: int) -> Seen | None:
    """What position `at` of a causal site sees; None where it sees nothing, or some heads more keys than others.

    seed: the run's, of a pattern that draws.
    """
    rule = pattern.mask_mod("decoder_self", layer, seed=seed)
    if rule is None:
        return slice(0, at + 1)
    with torch.inference_mode(False):  # that a step with gradients may keep what one without has listed
        allowed = dense(rule, Positions(torch.tensor([at]), torch.arange(at + 1)), heads)[0, :, 0]
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


def pick(held: Float[Tensor, "B H K E"], keys: Seen) -> Float[Tensor, "B H n E"]:
    """These positions of a cache; a slice is not copied."""
    if isinstance(keys, slice):
        return held[:, :, keys]
    if len(keys) == 1:
        return held.index_select(2, keys[0])
    heads, capacity = held.shape[1:3]
    places = keys + torch.arange(heads)[:, None] * capacity
    return held.flatten(1, 2).index_select(1, places.flatten()).unflatten(1, (heads, -1))
