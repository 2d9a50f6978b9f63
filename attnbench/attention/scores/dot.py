"""Dot products of queries and keys, plain or divided by the square root of the head width."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from attnbench.attention.scores.base import Score, ScoreSpec, scores
from attnbench.attention.types import Dims


def dot(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    """`s_ij = q_i . k_j`"""
    return query @ keys.transpose(-2, -1)


def scaled_dot(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    """`s_ij = q_i . k_j / sqrt(E)`, E the width of a head."""
    return (query * query.shape[-1] ** -0.5) @ keys.transpose(-2, -1)


@scores.register
class DotSpec(ScoreSpec):
    """Dot product without scaling."""

    kind: Literal["dot"] = "dot"
    paper: ClassVar[str] = "Luong et al. 2015, eq. 8"

    def build(self, dims: Dims) -> Score:
        return dot


@scores.register
class ScaledDotSpec(ScoreSpec):
    """Dot product divided by the square root of the head width."""

    kind: Literal["scaled_dot"] = "scaled_dot"
    paper: ClassVar[str] = "Vaswani et al. 2017, eq. 1"

    def build(self, dims: Dims) -> Score:
        return scaled_dot
