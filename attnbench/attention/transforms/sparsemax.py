"""Sparsemax: the point of the simplex nearest to the scores, `p_i = [z_i - tau]_+`."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms._simplex import (
    ROUNDS,
    Normaliser,
    centre,
    climb,
    exceeds,
    normalise,
    renormalise,
)
from attnbench.attention.transforms.base import Fused, ScoreTransform, TransformSpec, refuse, transforms
from attnbench.attention.types import Dims


def sparsemax(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "... K"]:
    """Euclidean projection of each row's valid scores onto the simplex.

    Source: Martins & Astudillo 2016, eq. 2 and proposition 1. Raises ValueError for `keep` and `upper`.
    """
    refuse("sparsemax", keep=keep, upper=upper)
    return normalise(scores, valid, SPARSEMAX)


def weigh(masked: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """Michelot's rounds: Newton's method on `sum [z - tau]_+ = 1` from below, where tau climbs and never overshoots."""
    centred = centre(masked)
    tau = torch.full_like(centred[..., :1], -1.0)  # the largest score alone would have mass 1
    support = torch.zeros_like(tau)
    for _ in range(ROUNDS):
        above = (centred - tau).relu_()
        excess = above.sum(-1, keepdim=True) - 1
        before, support = support, above.sign_().sum(-1, keepdim=True)
        tau = climb(tau, excess / support)
        if not bool((exceeds(excess) & (support != before)).any()):  # of the same keys the last step was exact
            break
    return renormalise((centred - tau).relu_())


def slope(weights: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """q = 1 on the support."""
    return weights.ceil()  # of NaN it is NaN; the sign would be 0


SPARSEMAX = Normaliser(weigh, slope, Fused("sparsemax"))


@transforms.register
class SparsemaxSpec(TransformSpec):
    """Euclidean projection onto the simplex: sparse, with a support that follows the scores."""

    kind: Literal["sparsemax"] = "sparsemax"
    paper: ClassVar[str] = "Martins & Astudillo 2016"

    def build(self, dims: Dims) -> ScoreTransform:
        return sparsemax

    def fused(self, built: ScoreTransform) -> Fused:
        return Fused("sparsemax")
