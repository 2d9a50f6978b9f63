"""Softmax: `p_i = e^{z_i} / sum_j e^{z_j}` over the valid keys."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms.base import ScoreTransform, TransformSpec, prepare, refuse, transforms
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
    masked, alive = prepare(scores, valid)
    weights = torch.softmax(masked, dim=-1)
    return weights.masked_fill(~alive, 0.0).to(scores.dtype)  # also empties the NaN of a row without keys


@transforms.register
class SoftmaxSpec(TransformSpec):
    """Dense attention: every valid key gets some weight."""

    kind: Literal["softmax"] = "softmax"
    paper: ClassVar[str] = "Bahdanau et al. 2015; Vaswani et al. 2017, eq. 1"

    def build(self, dims: Dims) -> ScoreTransform:
        return softmax
