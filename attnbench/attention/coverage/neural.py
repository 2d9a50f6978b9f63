"""Neural coverage: a recurrent cell for each key keeps what it has received."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from attnbench.attention.coverage.base import Coverage, CoverageSpec, coverages
from attnbench.attention.types import Dims


class NeuralCoverage(Coverage):
    """`C_{t,j} = GRU(C_{t-1,j}, [alpha_{t,j}; h_j; s_t])`; the part of h_j is computed once."""

    def __init__(self, dims: Dims, units: int) -> None:
        super().__init__()
        self.width = units
        self.of_weight = nn.Linear(1, 3 * units, bias=False)
        self.of_key = nn.Linear(dims.key_width, 3 * units)
        self.of_query = nn.Linear(dims.query_width, 3 * units, bias=False)
        self.of_before = nn.Linear(units, 3 * units)

    def memorize(self, states: Float[Tensor, "B K D"]) -> Float[Tensor, "B K G"]:
        return self.of_key(states)

    def forward(
        self,
        before: Float[Tensor, "R K d"],
        weights: Float[Tensor, "R K"],
        query: Float[Tensor, "R D"],
        kept: Float[Tensor, "R K G"] | None,
    ) -> Float[Tensor, "R K d"]:
        assert kept is not None  # memorize() made it
        given = kept + self.of_weight(weights.unsqueeze(-1)) + self.of_query(query).unsqueeze(1)
        from_given, from_before = given.chunk(3, -1), self.of_before(before).chunk(3, -1)
        reset, update = ((a + b).sigmoid() for a, b in zip(from_given[:2], from_before[:2], strict=True))
        candidate = torch.tanh(from_given[2] + reset * from_before[2])
        return torch.lerp(candidate, before.to(candidate.dtype), update.to(candidate.dtype))


@coverages.register
class NeuralCoverageSpec(CoverageSpec):
    """A small GRU a source position, which reads its attention, its state and the query."""

    kind: Literal["neural"] = "neural"
    paper: ClassVar[str] = "Tu et al. 2016"

    units: int = Field(default=10, ge=1)
    """d, the width of the cell."""

    def build(self, dims: Dims) -> NeuralCoverage:
        return NeuralCoverage(dims, self.units)
