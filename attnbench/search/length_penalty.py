"""Length penalties: a hypothesis of log-probability L and |Y| generated tokens (EOS included) scores L / lp(|Y|)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


class LengthPenaltySpec(Spec):
    """lp, positive and never falling as a hypothesis grows.

    Since log-probabilities only fall, a hypothesis that stands at L and may grow to n tokens ends at L / lp(n) at best.
    """

    kind: str

    def divisor(self, length: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        """lp of each length (1 and more), in float64."""
        raise unwritten(self, "divisor")


length_penalties: Registry[LengthPenaltySpec] = Registry("length penalty", LengthPenaltySpec, "attnbench.search")
LengthPenaltyField = Annotated[LengthPenaltySpec, Family(lambda: length_penalties)]


@length_penalties.register
class NoPenalty(LengthPenaltySpec):
    """lp = 1: the plain log-probability, which favours short outputs."""

    kind: Literal["none"] = "none"

    def divisor(self, length: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        return torch.ones_like(length, dtype=torch.float64)


@length_penalties.register
class AveragePenalty(LengthPenaltySpec):
    """lp = |Y|^alpha; alpha 1 is the mean log-probability of a token (fairseq's `lenpen`)."""

    kind: Literal["avg"] = "avg"
    alpha: float = Field(default=1.0, ge=0, le=10, allow_inf_nan=False)
    """0: no penalty; larger favours longer outputs."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.alpha:
            yield "alpha", "at 0 there is no penalty, as with `penalty: none`"

    def divisor(self, length: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        return length.double() ** self.alpha


@length_penalties.register
class WuPenalty(LengthPenaltySpec):
    """lp = ((5 + |Y|) / 6)^alpha (Wu et al. 2016, equation 14)."""

    kind: Literal["wu"] = "wu"
    alpha: float = Field(default=0.6, ge=0, le=10, allow_inf_nan=False)
    """0: no penalty; larger favours longer outputs."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.alpha:
            yield "alpha", "at 0 there is no penalty, as with `penalty: none`"

    def divisor(self, length: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        return ((5.0 + length.double()) / 6.0) ** self.alpha
