"""The interface of a fertility and of its spec (Malaviya et al. 2018)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from jaxtyping import Float
from torch import Tensor, nn

from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec
from attnbench.models.base import Sizes, Source

Lessons = Sequence[Source]
"""Batches of training sources that bring their fertilities: the target words aligned to each token, at least 1."""
Needs = Literal["nothing", "lessons", "oracle"]


class Fertility(nn.Module, ABC):
    """Gives each position of the sources its fertility; what it gives the last one, the sink, is not looked at."""

    exact: ClassVar[bool] = True
    """Its layers are not rounded where a search multiplies whole numbers of 8 bits (core/packed.py)."""
    needs: ClassVar[Needs] = "nothing"
    """lessons: `learn` is called before training; what it learned is part of the weights. oracle: every source has to
    bring its own fertilities."""

    def __init__(self, spec: FertilitySpec) -> None:
        super().__init__()
        self.spec = spec

    @abstractmethod
    def forward(self, source: Source) -> Float[Tensor, "B S"]: ...

    def learn(self, train: Lessons, valid: Lessons, seed: int) -> None:
        """Learn from aligned sources, once, before the model is trained. valid: to choose by."""

    def report(self) -> dict[str, float]:
        """What a table may say of how well it learned."""
        return {}


class FertilitySpec(Spec):
    """The fields of one kind of fertility in YAML, and how to build it."""

    kind: str
    paper: ClassVar[str] = ""

    def build(self, sizes: Sizes) -> Fertility:
        raise unwritten(self, "build")


fertilities: Registry[FertilitySpec] = Registry("fertility", FertilitySpec, "attnbench.models.fertility")
FertilityField = Annotated[FertilitySpec, Family(lambda: fertilities)]
