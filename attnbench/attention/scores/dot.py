"""Dot products of queries and keys, plain or divided by the square root of the head width."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from attnbench.attention import cached
from attnbench.attention.scores.base import Score, ScoreSpec, scores
from attnbench.attention.types import Dims


def dot(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    """`s_ij = q_i . k_j`"""
    return cached.compare(query, keys)


def scaled_dot(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    """`s_ij = q_i . k_j / sqrt(E)`, E the width of a head."""
    return cached.compare(query * query.shape[-1] ** -0.5, keys)


class Dot(Score):
    """See `dot`."""

    @property
    def scale(self) -> float:
        return 1.0

    def forward(
        self, query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"], feature: Tensor | None = None
    ) -> Float[Tensor, "B H Q K"]:
        return dot(query, keys)


class ScaledDot(Score):
    """See `scaled_dot`."""

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self._scale = dims.query_width**-0.5

    @property
    def scale(self) -> float:
        return self._scale

    def forward(
        self, query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"], feature: Tensor | None = None
    ) -> Float[Tensor, "B H Q K"]:
        return scaled_dot(query, keys)


@scores.register
class DotSpec(ScoreSpec):
    """Dot product without scaling."""

    kind: Literal["dot"] = "dot"
    any_rank: ClassVar[bool] = True
    paper: ClassVar[str] = "Luong et al. 2015, eq. 8"

    def check(self, query_width: int, key_width: int) -> None:
        _same_width(self.kind, query_width, key_width)

    def build(self, dims: Dims) -> Score:
        return Dot(dims)


@scores.register
class ScaledDotSpec(ScoreSpec):
    """Dot product divided by the square root of the head width."""

    kind: Literal["scaled_dot"] = "scaled_dot"
    any_rank: ClassVar[bool] = True
    paper: ClassVar[str] = "Vaswani et al. 2017, eq. 1"

    def check(self, query_width: int, key_width: int) -> None:
        _same_width(self.kind, query_width, key_width)

    def build(self, dims: Dims) -> Score:
        return ScaledDot(dims)


def _same_width(kind: str, query_width: int, key_width: int) -> None:
    if query_width != key_width:
        raise ValueError(
            f"the score '{kind}' cannot compare queries of width {query_width} with keys of width {key_width}; "
            "make them equal, or take the score 'bilinear' or 'additive'"
        )
