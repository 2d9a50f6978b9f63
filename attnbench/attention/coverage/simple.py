"""Coverage as the sum of the attention received."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from attnbench.attention.coverage.base import Coverage, CoverageSpec, coverages
from attnbench.attention.types import Dims


class SimpleCoverage(Coverage):
    """`C_{t,j} = C_{t-1,j} + alpha_{t,j}`"""

    width = 1

    def forward(
        self,
        before: Float[Tensor, "R K 1"],
        weights: Float[Tensor, "R K"],
        query: Float[Tensor, "R D"],
        kept: Tensor | None,
    ) -> Float[Tensor, "R K 1"]:
        return before + weights.unsqueeze(-1)


@coverages.register
class SimpleCoverageSpec(CoverageSpec):
    """The sum of the weights that a source position has received."""

    kind: Literal["simple"] = "simple"
    paper: ClassVar[str] = "Malaviya et al. 2018 (CovVector)"

    def build(self, dims: Dims) -> SimpleCoverage:
        return SimpleCoverage()
