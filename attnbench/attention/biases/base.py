"""The interface of a bias and of its spec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from attnbench.attention.types import ROLES, Dims, Positions, Role
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


class Bias(nn.Module, ABC):
    """What is added to the scores before they are masked."""

    @abstractmethod
    def forward(self, positions: Positions, left: Float[Tensor, "B #H Q K"] | None) -> Float[Tensor, "#B #H #Q K"]:
        """left: what each key may still receive, inf for one that never ends; None where no bounds are kept."""


class BiasSpec(Spec):
    """The fields of one bias in YAML, and how to build it."""

    kind: str
    roles: ClassVar[frozenset[Role]] = frozenset(ROLES)
    needs_upper: ClassVar[bool] = False
    """True: depends on what was attended before, so only decoders that run step by step can use it."""
    paper: ClassVar[str] = ""

    def build(self, dims: Dims) -> Bias:
        raise unwritten(self, "build")


biases: Registry[BiasSpec] = Registry("bias", BiasSpec, "attnbench.attention.biases")
BiasField = Annotated[BiasSpec, Family(lambda: biases)]
