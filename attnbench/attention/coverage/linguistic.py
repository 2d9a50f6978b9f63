"""Linguistic coverage: the attention received, divided by a learned fertility."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from attnbench.attention.coverage.base import Coverage, CoverageSpec, coverages
from attnbench.attention.types import Dims

LEAST = 1e-6
"""The smallest Phi: the gradient holds its square's inverse."""


class LinguisticCoverage(Coverage):
    """`C_{t,j} = C_{t-1,j} + alpha_{t,j} / Phi_j`, `Phi_j = N sigmoid(U_f h_j)`."""

    width = 1

    def __init__(self, dims: Dims, most: float) -> None:
        super().__init__()
        self.most = most
        self.fertility = nn.Linear(dims.key_width, 1, bias=False)

    def memorize(self, states: Float[Tensor, "B K D"]) -> Float[Tensor, "B K 1"]:
        """Phi, in float32 at least: a rounded one would divide at every step."""
        with torch.autocast(states.device.type, enabled=False):
            wide = states.float() if states.dtype.itemsize < 4 else states
            return (self.most * self.fertility(wide).sigmoid()).clamp_min(LEAST)

    def forward(
        self,
        before: Float[Tensor, "R K 1"],
        weights: Float[Tensor, "R K"],
        query: Float[Tensor, "R D"],
        kept: Float[Tensor, "R K 1"] | None,
    ) -> Float[Tensor, "R K 1"]:
        assert kept is not None  # memorize() made it
        return before + weights.unsqueeze(-1) / kept


@coverages.register
class LinguisticCoverageSpec(CoverageSpec):
    """Attention received over a fertility between 0 and N that is learned from the source state."""

    kind: Literal["linguistic"] = "linguistic"
    paper: ClassVar[str] = "Tu et al. 2016"

    most: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """N, the largest fertility."""

    def build(self, dims: Dims) -> LinguisticCoverage:
        return LinguisticCoverage(dims, self.most)
