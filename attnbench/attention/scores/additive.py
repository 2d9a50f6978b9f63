"""Additive scores (Bahdanau et al.): a one-layer network reads query and key."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnbench.attention.scores import _additive
from attnbench.attention.scores.base import Score, ScoreSpec, project, scores
from attnbench.attention.types import Dims
from attnbench.core.carried import carried
from attnbench.core.seeding import drawn_apart

BLOCK = 1 << 26
"""Tanh units held at a time: 256 MiB in float32."""


class Additive(Score):
    """`s_ij = v . tanh(W_q q_i + W_k k_j + b)`, one network a head. `W_k k_j + b` is computed once.

    With a coverage C: `s_ij = v . tanh(W_q q_i + W_k k_j + V C_j + b)` (Tu et al. 2016).
    """

    def __init__(self, dims: Dims, units: int) -> None:
        super().__init__(dims)
        self.key_width = units
        self.query_weight = nn.Parameter(torch.empty(dims.heads, dims.query_width, units))
        self.key_weight = nn.Parameter(torch.empty(dims.heads, dims.key_width, units))
        self.bias = nn.Parameter(torch.zeros(dims.heads, 1, units))
        self.vector = nn.Parameter(torch.empty(dims.heads, units))
        for matrix in (*self.query_weight, *self.key_weight):
            nn.init.xavier_uniform_(matrix)
        nn.init.uniform_(self.vector, -(units**-0.5), units**-0.5)
        if dims.feature_width:
            self.feature_weight = nn.Parameter(torch.empty(dims.heads, dims.feature_width, units))
            with drawn_apart("coverage in the score"):
                for matrix in self.feature_weight:
                    nn.init.xavier_uniform_(matrix)

    def keys(self, states: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H K A"]:
        return project(states, self.key_weight) + self.bias

    def forward(
        self,
        query: Float[Tensor, "B H Q E"],
        keys: Float[Tensor, "B H K A"],
        feature: Float[Tensor, "B Q K d"] | None = None,
    ) -> Float[Tensor, "B H Q K"]:
        """The tanh units are B*H*Q*K*A: compiled code holds none of them; else past BLOCK of them queries go in
        blocks, whose units backward makes again."""
        weight, vector = self.query_weight.to(query.dtype), self.vector.to(query.dtype)  # queries may come widened
        queries = project(query, weight)
        if feature is not None:  # each query has features of its own, and there are few: the hypotheses of one step
            features = torch.einsum("bqkd,hda->bhqka", feature.to(query.dtype), self.feature_weight.to(query.dtype))
            return _units(queries, keys, vector, features)
        if _additive.serves(queries, keys, vector):
            return _additive.units(queries, keys, vector)
        most = max(1, BLOCK // max(1, keys.numel()))
        if queries.shape[2] <= most:
            return _units(queries, keys, vector)
        blocks = queries.split(most, dim=2)
        # nothing is drawn there
        again = partial(checkpoint, carried(_units), use_reentrant=False, preserve_rng_state=False)
        return torch.cat([again(block, keys, vector) for block in blocks], dim=2)


def _units(
    queries: Float[Tensor, "B H Q A"],
    keys: Float[Tensor, "B H K A"],
    vector: Float[Tensor, "H A"],
    features: Float[Tensor, "B H Q K A"] | None = None,
) -> Float[Tensor, "B H Q K"]:
    hidden = queries.unsqueeze(-2) + keys.unsqueeze(-3)
    hidden = (hidden if features is None else hidden + features).tanh_()
    return torch.einsum("bhqka,ha->bhqk", hidden, vector)


@scores.register
class AdditiveSpec(ScoreSpec):
    """A layer of tanh units over query and key, then a weight vector."""

    kind: Literal["additive"] = "additive"
    takes_feature: ClassVar[bool] = True
    paper: ClassVar[str] = "Bahdanau et al. 2015, appendix A.1.2"

    units: int | None = Field(default=None, ge=1)
    """Hidden units; null: as many as the query is wide."""

    def build(self, dims: Dims) -> Score:
        return Additive(dims, self.units or dims.query_width)
