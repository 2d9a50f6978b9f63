"""Coverage penalty: outputs that leave source words unread rank lower (Wu et al. 2016, equation 14)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


class CoveragePenaltySpec(Spec):
    """cp, never above 0: a hypothesis of log-probability L scores `L / lp + cp`."""

    kind: str

    def penalty(self, received: Float[Tensor, "n size S"], words: Bool[Tensor, "n S"]) -> Float[Tensor, "n size"]:
        """cp of hypotheses whose steps gave `received` to the source. words: no padding, no EOS."""
        raise unwritten(self, "penalty")


coverage_penalties: Registry[CoveragePenaltySpec] = Registry(
    "coverage penalty", CoveragePenaltySpec, "attnbench.search"
)
CoveragePenaltyField = Annotated[CoveragePenaltySpec, Family(lambda: coverage_penalties)]


@coverage_penalties.register
class WuCoverage(CoveragePenaltySpec):
    """`cp = beta * sum_i log(min(received_i, 1))`, with `floor` in the place of what is less."""

    kind: Literal["wu"] = "wu"
    beta: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """0: no penalty; larger favours outputs that have read every word."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Least that counts as received: sparse attention gives some words nothing at all, whose logarithm is -inf."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.beta:
            yield "beta", "at 0 there is no penalty, as with `coverage: null`"
        elif self.floor == 1:
            yield "floor", "at 1 every word counts as read, and so the penalty does nothing either"

    def penalty(self, received: Float[Tensor, "n size S"], words: Bool[Tensor, "n S"]) -> Float[Tensor, "n size"]:
        each = received.clamp(self.floor, 1.0).log().masked_fill(~words[:, None, :], 0.0)
        return self.beta * each.sum(-1)
