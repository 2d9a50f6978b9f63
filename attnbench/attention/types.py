"""Words the attention floor shares.

Shape letters: `B` batch, `H` heads, `Q` queries, `K` keys, `D` model width, `E` head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

Role = Literal["encoder_self", "decoder_self", "cross"]
ROLES: tuple[Role, ...] = ("encoder_self", "decoder_self", "cross")

Backend = Literal["auto", "dense", "banded", "flex", "sdpa", "triton"]
"""What a site goes through; auto: what takes least time, dense or banded on a processor."""

MOST_POSITIONS = 2**31 - 1
"""That a budget may name; products of two such numbers are still whole numbers of 64 bits."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, h, q, k) -> bool, elementwise over absolute positions; the signature of flex_attention."""


class Positions(NamedTuple):
    """Absolute positions: training passes 0..n-1, a decode step passes [t]."""

    q: Int[Tensor, "Q"]
    k: Int[Tensor, "K"]


class Dims(NamedTuple):
    """What a part of an attention module may need to know of the module it is built for."""

    layer: int = 0
    heads: int = 1
    query_width: int = 1
    key_width: int = 1
    longest_source: int | None = None
    feature_width: int = 0
    """Width of what a coverage tells the score of each key; 0: there is none."""


class AttentionOutput(NamedTuple):
    """context: what the queries received. weights: None unless asked for. history: None where none is kept."""

    context: Float[Tensor, "B Q D"]
    weights: Float[Tensor, "B H Q K"] | None = None
    history: History | None = None


class History(NamedTuple):
    """What each source position has received so far; part of a decoder's state, so that beams carry their own."""

    spent: Float[Tensor, "R H K"]
    """The weights of all steps so far, one row a hypothesis; their gradient is kept."""
    feature: Float[Tensor, "R K d"] | None = None
    """What the coverage makes of them."""


class Memory(NamedTuple):
    """All that answering queries needs of the keys, one row a source.

    keys: as the score wants them; None where queries choose among the values without keys. values: what is mixed.
    valid: which of them exist; None when all do. filled: how many hold something, in a cache that fills from the left;
    None when all do. written: the weight of each source state in each slot, of fixed-size memory alone, and only where
    maps were asked for. fertility: how much each may receive in all (history.endow), where that is bounded.
    coverage: what the coverage keeps of the keys. right_padded: `valid` is known to hide the right end of rows alone.
    """

    keys: Float[Tensor, "B H K E"] | None
    values: Float[Tensor, "B H K E2"]
    valid: Bool[Tensor, "B K"] | None = None
    filled: int | None = None
    written: Float[Tensor, "B S K"] | None = None
    fertility: Float[Tensor, "B K"] | None = None
    coverage: Float[Tensor, "B K G"] | None = None
    right_padded: bool = False
