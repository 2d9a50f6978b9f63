"""Sigmoid: every key has a gate of its own, `p_i = 1 / (1 + e^{-z_i})`; a row need not sum to 1."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms.base import ScoreTransform, TransformSpec, finish, prepare, refuse, transforms
from attnbench.attention.types import Dims


def sigmoid(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "... K"]:
    """Elementwise over the valid keys; `keep` changes nothing, since every valid key is attended."""
    refuse("sigmoid", upper=upper)
    prepared = prepare(scores, valid)
    return finish(torch.sigmoid(prepared.scores), prepared.alive, scores)


@transforms.register
class SigmoidSpec(TransformSpec):
    """A gate between 0 and 1 for each key; rows need not sum to 1."""

    kind: Literal["sigmoid"] = "sigmoid"
    rows: ClassVar[Literal["simplex", "gates"]] = "gates"
    paper: ClassVar[str] = "Britz et al. 2017 (Fixed-Size Memory), section 3.2"

    def build(self, dims: Dims) -> ScoreTransform:
        return sigmoid
