"""Fertilities: how much attention each source word may receive in all (Malaviya et al. 2018)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from attnbench.core.registry import Family, Registry
from attnbench.core.spec import Spec
from attnbench.models.base import Sizes, Source


class Fertility(nn.Module, ABC):
    """Gives each position of the sources its fertility; what it gives the last one, the sink, is not looked at."""

    @abstractmethod
    def forward(self, source: Source) -> Float[Tensor, "B S"]: ...


class FertilitySpec(Spec):
    """The fields of one kind of fertility in YAML, and how to build it."""

    kind: str
    paper: ClassVar[str] = ""

    def build(self, sizes: Sizes) -> Fertility:
        raise NotImplementedError


fertilities: Registry[FertilitySpec] = Registry("fertility", FertilitySpec, "attnbench.models")
FertilityField = Annotated[FertilitySpec, Family(lambda: fertilities)]


class ConstantFertility(Fertility):
    """The same for every word."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

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
        return ConstantFertility(self.value)
