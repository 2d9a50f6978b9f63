"""Softmax: `p_i = e^{z_i} / sum_j e^{z_j}` over the valid keys."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms._simplex import Normaliser, centre, normalise, renormalise
from attnbench.attention.transforms.base import Fused, ScoreTransform, TransformSpec, refuse, transforms
from attnbench.attention.types import Dims


def softmax(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "... K"]:
    """Softmax over the valid keys; `keep` changes nothing, since every valid key is attended."""
    refuse("softmax", upper=upper)
    return normalise(scores, valid, SOFTMAX)


def weigh(masked: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    # e^z of a spoilt row's living keys is +inf, which `renormalise` makes NaN
    return renormalise(centre(masked).exp_())


def slope(weights: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """q = p."""
    return weights


SOFTMAX = Normaliser(weigh, slope, Fused("softmax"))


@transforms.register
class SoftmaxSpec(TransformSpec):
    """Dense attention: every valid key gets some weight."""

    kind: Literal["softmax"] = "softmax"
    paper: ClassVar[str] = "Bahdanau et al. 2015; Vaswani et al. 2017, eq. 1"

    def is_softmax(self, keys: int | None = None) -> bool:
        return True

    def build(self, dims: Dims) -> ScoreTransform:
        return softmax

    def fused(self, built: ScoreTransform) -> Fused:
        return Fused("softmax")
