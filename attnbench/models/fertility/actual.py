"""Fertility by an oracle: what the alignment with the reference shows."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from attnbench.core.errors import AttnbenchError
from attnbench.models.base import Sizes, Source
from attnbench.models.fertility.base import Fertility, FertilitySpec, Needs, fertilities


class ActualFertility(Fertility):
    """See ActualFertilitySpec."""

    needs: ClassVar[Needs] = "oracle"

    def __init__(self, spec: ActualFertilitySpec) -> None:
        super().__init__(spec)
        self.slack = spec.slack

    def forward(self, source: Source) -> Float[Tensor, "B S"]:
        if source.fertility is None:
            raise AttnbenchError(
                "the fertility 'actual' is an oracle that asks the reference, and these sources have none; take "
                "'constant', 'guided' or 'predicted' to translate new text"
            )
        return source.fertility + self.slack


@fertilities.register
class ActualFertilitySpec(FertilitySpec):
    """The target words that each source word is aligned to, references of validation and test included: an oracle."""

    kind: Literal["actual"] = "actual"
    paper: ClassVar[str] = "Malaviya et al. 2018"

    slack: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Added to what the alignment shows."""

    def build(self, sizes: Sizes) -> ActualFertility:
        return ActualFertility(self)
