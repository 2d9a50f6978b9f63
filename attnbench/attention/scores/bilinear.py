"""Bilinear scores, called "general" by Luong et al.: a matrix stands between query and key."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnbench.attention.scores.base import Score, ScoreSpec, project, scores
from attnbench.attention.scores.dot import dot
from attnbench.attention.types import Dims
from attnbench.core.seeding import drawn_apart


class Bilinear(Score):
    """`s_ij = q_i . (W k_j)`, W `[query width, key width]`, one a head. The product with the keys is taken once.

    With a coverage C: `s_ij = (q_i + sum_d w_d C_jd) . (W k_j)`.
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.key_width = dims.query_width
        self.weight = nn.Parameter(torch.empty(dims.heads, dims.key_width, dims.query_width))
        for matrix in self.weight:
            nn.init.xavier_uniform_(matrix)
        if dims.feature_width:
            self.feature_weight = nn.Parameter(torch.empty(dims.heads, dims.feature_width, dims.query_width))
            with drawn_apart("coverage in the score"):
                for matrix in self.feature_weight:
                    nn.init.xavier_uniform_(matrix)

    def keys(self, states: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H K E2"]:
        return project(states, self.weight)

    def forward(
        self,
        query: Float[Tensor, "B H Q E2"],
        keys: Float[Tensor, "B H K E2"],
        feature: Float[Tensor, "B Q K d"] | None = None,
    ) -> Float[Tensor, "B H Q K"]:
        scores = dot(query, keys)
        if feature is None:
            return scores
        of_keys = torch.einsum("bhke,hde->bhkd", keys, self.feature_weight.to(keys.dtype))
        return scores + torch.einsum("bhkd,bqkd->bhqk", of_keys, feature.to(keys.dtype))


@scores.register
class BilinearSpec(ScoreSpec):
    """Dot product of the query with linearly mapped keys."""

    kind: Literal["bilinear"] = "bilinear"
    takes_feature: ClassVar[bool] = True
    paper: ClassVar[str] = "Luong et al. 2015, eq. 8 (general)"

    def build(self, dims: Dims) -> Score:
        return Bilinear(dims)
