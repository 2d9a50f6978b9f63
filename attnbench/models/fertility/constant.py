"""The same fertility for every word."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from attnbench.models.base import Sizes, Source
from attnbench.models.fertility.base import Fertility, FertilitySpec, fertilities


class ConstantFertility(Fertility):
    """See ConstantFertilitySpec."""

    def __init__(self, spec: ConstantFertilitySpec) -> None:
        super().__init__(spec)
        self.value = spec.value

    def forward(self, source: Source) -> Float[Tensor, "B S"]:
        return torch.full(source.valid.shape, self.value, device=source.valid.device)


@fertilities.register
class ConstantFertilitySpec(FertilitySpec):
    """Every source word may receive the same."""

    kind: Literal["constant"] = "constant"
    paper: ClassVar[str] = "Malaviya et al. 2018"

    value: float = Field(ge=0, allow_inf_nan=False)
    """The attention that each word may receive, 1 being all of one step."""

    def build(self, sizes: Sizes) -> ConstantFertility:
        return ConstantFertility(self)
