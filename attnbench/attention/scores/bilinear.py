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

    With a coverage C: `s_ij = (W^T q_i + sum_d C_jd w_d) . k_j`, where the products `w_d . k_j` are taken once, too
    (CovVector as in the code of Malaviya et al. 2018).
    """

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        self.query_width = dims.query_width
        self.key_width = dims.query_width + dims.feature_width
        self.weight = nn.Parameter(torch.empty(dims.heads, dims.key_width, dims.query_width))
        for matrix in self.weight:
            nn.init.xavier_uniform_(matrix)
        self.feature_vectors: nn.Parameter | None = None
        if dims.feature_width:
            self.feature_vectors = nn.Parameter(torch.empty(dims.heads, dims.key_width, dims.feature_width))
            with drawn_apart("coverage in the score"):
                for matrix in self.feature_vectors:
                    nn.init.xavier_uniform_(matrix)

    def keys(self, states: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H K E2"]:
        """`W k_j`, and behind it the `w_d . k_j` where a coverage is told."""
        vectors = self.feature_vectors
        return project(states, self.weight if vectors is None else torch.cat([self.weight, vectors], -1))

    def forward(
        self,
        query: Float[Tensor, "B H Q E"],
        keys: Float[Tensor, "B H K E2"],
        feature: Float[Tensor, "B Q K d"] | None = None,
    ) -> Float[Tensor, "B H Q K"]:
        if feature is None:
            return dot(query, keys)
        mapped, of_features = keys.split([self.query_width, feature.shape[-1]], -1)
        return dot(query, mapped) + torch.einsum("bhkd,bqkd->bhqk", of_features, feature.to(keys.dtype))


@scores.register
class BilinearSpec(ScoreSpec):
    """Dot product of the query with linearly mapped keys."""

    kind: Literal["bilinear"] = "bilinear"
    takes_feature: ClassVar[bool] = True
    paper: ClassVar[str] = "Luong et al. 2015, eq. 8 (general)"

    def build(self, dims: Dims) -> Score:
        return Bilinear(dims)
