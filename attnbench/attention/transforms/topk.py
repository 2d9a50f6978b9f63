"""Top-k: softmax over the k best valid keys of each row; the others get weight 0 (Explicit Sparse Transformer)."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor

from attnbench.attention.transforms._simplex import Normaliser, centre, normalise, renormalise
from attnbench.attention.transforms.base import Fused, ScoreTransform, TransformSpec, check_mask, refuse, transforms
from attnbench.attention.transforms.softmax import SOFTMAX, slope
from attnbench.attention.types import MOST_POSITIONS, Dims, Role

Ties = Literal["threshold", "index"]

_FINEST = 10**6
"""A ratio is a fraction of whole numbers up to this: 0.07 of 100 keys are 7, in floating point a little more."""

_SORTED_WIDTH = 256
"""Up to this row length NumPy's vectorised sort beats `torch.topk` on a CPU (measured: 8 times at 32 keys)."""


def topk(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
    k: int | None,
    share: tuple[int, int] | None,
    at_least: int,
    ties: Ties,
) -> Float[Tensor, "... K"]:
    """Softmax over `{j valid: z_j >= t}`, t the k-th largest valid score of the row, and over the valid keys in `keep`.

    k: keys a row keeps; 0 or None keeps all. share: (p, q), instead of k `max(at_least, ceil(p / q * valid keys of the
    row))`: whole numbers, of which torch.compile may make symbols. ties: `threshold` keeps every key that equals t, so
    a row may keep more than k; `index` keeps exactly k, those with the lowest index first. t is a constant in the
    gradient. Source: Zhao et al. 2019, eq. 2-4. Raises ValueError for `upper`; the other settings are those of a
    TopKSpec.
    """
    refuse("topk", upper=upper)
    check_mask("keep", keep, scores)
    if share is None and (not k or k >= scores.shape[-1]):
        return normalise(scores, valid, SOFTMAX)
    weigh = partial(_weigh, k=k, share=share, at_least=at_least, ties=ties, keep=keep)
    plain = k is not None and ties == "threshold" and keep is None
    return normalise(scores, valid, Normaliser(weigh, slope, Fused("topk", k or 0) if plain else None))


def _weigh(
    masked: Float[Tensor, "... K"],
    *,
    k: int | None,
    share: tuple[int, int] | None,
    at_least: int,
    ties: Ties,
    keep: Bool[Tensor, "..."] | None,
) -> Float[Tensor, "... K"]:
    length = masked.shape[-1]
    if share is None:
        count = k or length
        kth = largest(masked, count)[..., :1]
    else:
        count, kth = _largest_share(masked, share, at_least)
    spoilt = masked.amax(-1, keepdim=True) == torch.inf
    kth = kth.masked_fill(spoilt, -torch.inf)  # every valid key of a spoilt row must become NaN
    if ties == "threshold":
        chosen = torch.ge(masked, kth, out=torch.empty_like(masked))
    else:
        above = torch.gt(masked, kth, out=torch.empty_like(masked))
        level = torch.eq(masked, kth, out=torch.empty_like(masked))
        room = count - above.sum(-1, keepdim=True)
        chosen = above + level * (level.cumsum(-1) <= room)
    if keep is not None:
        chosen = torch.maximum(chosen, keep.to(chosen.dtype))
    return renormalise(centre(masked).exp_().mul_(chosen))


def largest(masked: Float[Tensor, "... K"], count: int) -> Float[Tensor, "... N"]:
    """The `count` largest of each row in ascending order, so that the first is the count-th best."""
    if count == 1:
        return masked.amax(-1, keepdim=True)
    if masked.device.type == "cpu" and masked.shape[-1] <= _SORTED_WIDTH and not torch.compiler.is_compiling():
        return torch.from_numpy(np.sort(masked.numpy(), axis=-1)[..., -count:])
    return torch.topk(masked, count, dim=-1).values.flip(-1)


def _largest_share(
    masked: Float[Tensor, "... K"], share: tuple[int, int], at_least: int
) -> tuple[Float[Tensor, "... 1"], Float[Tensor, "... 1"]]:
    """How many keys each row keeps, and the smallest score it keeps."""
    length = masked.shape[-1]
    alive = (masked > -torch.inf).sum(-1, keepdim=True)
    part, whole = share
    count = (-(-alive * part // whole)).clamp(min=at_least)  # rounded up
    longest = min(length, max(at_least, -(-length * part // whole)))
    kth = largest(masked, longest).gather(-1, longest - count.clamp(max=longest))
    return count.to(masked.dtype), kth


@transforms.register
class TopKSpec(TransformSpec):
    """Softmax over the k best keys of each row."""

    kind: Literal["topk"] = "topk"
    paper: ClassVar[str] = "Zhao et al. 2019 (Explicit Sparse Transformer), eq. 2-4"

    k: int | None = Field(default=None, ge=0, le=MOST_POSITIONS)
    """Keys that a row keeps; 0 or null keeps all."""
    ratio: float | None = Field(default=None, gt=0, le=1)
    """Instead of k: the part of its valid keys that a row keeps, rounded up."""
    at_least: int = Field(default=1, ge=1, le=MOST_POSITIONS)
    """With ratio: the fewest keys a row keeps."""
    ties: Ties = "threshold"
    """Keys equal to the k-th best: `threshold` keeps all of them, `index` those that come first, k in all."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.k is not None and self.ratio is not None:
            raise ValueError("give k or ratio, not both")
        if self.at_least != 1 and self.ratio is None:
            raise ValueError("at_least goes with ratio; drop it, or give ratio in place of k")
        return self

    @property
    def ordered(self) -> bool:
        return self.ties == "index"

    def require(self) -> None:
        if not self.model_fields_set & {"k", "ratio"}:
            raise ValueError("topk needs to know how many keys a row keeps: give k, ratio or a budget (k: 0 keeps all)")

    def is_softmax(self, keys: int | None = None) -> bool:
        if self.ratio is not None:
            return self.ratio == 1 or (keys is not None and self.at_least >= keys)
        return not self.k or (keys is not None and self.k >= keys)

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.is_softmax():
            for name in ("ties", "at_least"):
                if self.is_set(name):
                    yield name, "a row keeps all of its keys"

    def build(self, dims: Dims) -> ScoreTransform:
        return partial(topk, k=self.k, share=self._share, at_least=self.at_least, ties=self.ties)

    def fused(self, built: ScoreTransform) -> Fused:
        share = None if self._share is None else (*self._share, self.at_least)
        return Fused("topk", self.k or 0, share=share, first=self.ties == "index")

    @property
    def _share(self) -> tuple[int, int] | None:
        return None if self.ratio is None else Fraction(self.ratio).limit_denominator(_FINEST).as_integer_ratio()

    @classmethod
    def from_budget(cls, n: int, role: Role) -> Self | None:
        return cls(k=n)
