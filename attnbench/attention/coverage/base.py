"""The interface of a coverage and of its spec (Tu et al. 2016)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from attnbench.attention.types import Dims
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


class Coverage(nn.Module, ABC):
    """`C_{t,j} = g(C_{t-1,j}, alpha_{t,j}, h_j, s_t)`, C_0 = 0; the score of step t sees C_{t-1}."""

    exact: ClassVar[bool] = True
    """Its layers are not rounded where a search multiplies whole numbers of 8 bits (core/packed.py)."""
    width: int
    """d, the width of C."""

    def memorize(self, states: Float[Tensor, "B K D"]) -> Tensor | None:
        """What of `forward` depends on the keys alone, a row a source; None where nothing does."""
        return None

    @abstractmethod
    def forward(
        self,
        before: Float[Tensor, "R K d"],
        weights: Float[Tensor, "R K"],
        query: Float[Tensor, "R D"],
        kept: Tensor | None,
    ) -> Float[Tensor, "R K d"]:
        """C after a step. kept: from `memorize`, a row a hypothesis."""


class CoverageSpec(Spec):
    """The fields of one coverage in YAML, and how to build it."""

    kind: str
    paper: ClassVar[str] = ""

    def build(self, dims: Dims) -> Coverage:
        raise unwritten(self, "build")


coverages: Registry[CoverageSpec] = Registry("coverage", CoverageSpec, "attnbench.attention.coverage")
CoverageField = Annotated[CoverageSpec, Family(lambda: coverages)]
