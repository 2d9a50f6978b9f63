"""1.5-entmax: `p_i = [z_i / 2 - tau]_+^2`, between softmax and sparsemax."""

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


def entmax15(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "... K"]:
    """alpha-entmax with alpha = 1.5 over the valid keys, exact up to rounding.

    Source: Peters et al. 2019, section 4. Raises ValueError for `keep` and `upper`.
    """
    refuse("entmax15", keep=keep, upper=upper)
    return normalise(scores, valid, ENTMAX15)


def weigh(masked: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    half = centre(masked).mul_(0.5)
    return renormalise((half - threshold(half)).relu_().square_())


def threshold(half: Float[Tensor, "... K"]) -> Float[Tensor, "... 1"]:
    """tau of centred scores / 2: Newton's method on `||[z/2 - tau]_+||_2 = 1` from below.

    The norm is convex and falls in tau, so tau climbs and never overshoots; on rows of equal scores one round is exact.
    """
    tau = torch.full_like(half[..., :1], -1.0)  # the largest score alone would have mass 1
    for _ in range(ROUNDS):
        above = (half - tau).relu_()
        norm = torch.linalg.vector_norm(above, dim=-1, keepdim=True)
        before, tau = tau, climb(tau, (norm - 1) * norm / above.sum(-1, keepdim=True))
        if not bool(exceeds(tau - before).any()):  # after such a step the mass is wrong by its square, key for key
            break
    return tau


def slope(weights: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """q = sqrt(p)."""
    return weights.sqrt()


ENTMAX15 = Normaliser(weigh, slope, Fused("entmax15"))


@transforms.register
class Entmax15Spec(TransformSpec):
    """alpha-entmax with alpha = 1.5: sparse, with softer edges than sparsemax."""

    kind: Literal["entmax15"] = "entmax15"
    paper: ClassVar[str] = "Peters et al. 2019"

    def build(self, dims: Dims) -> ScoreTransform:
        return entmax15

    def fused(self, built: ScoreTransform) -> Fused:
        return Fused("entmax15")
