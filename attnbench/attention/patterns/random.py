"""The random pattern: each row draws n of its keys, once and for all."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Int
from torch import Tensor

from attnbench.attention.patterns._drawn import DrawnSpec
from attnbench.attention.patterns.base import Extent, Layout, patterns
from attnbench.attention.types import ROLES, MaskMod, Role


@patterns.register
class RandomSpec(DrawnSpec):
    """n keys a row, drawn without replacement from those that exist; other heads and layers draw others."""

    kind: Literal["random"] = "random"
    roles: ClassVar[frozenset[Role]] = frozenset(ROLES)

    def most(self, role: Role) -> int | None:
        return self.n

    def mask_mod(
        self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0
    ) -> MaskMod:
        self.require()
        return self.draw(self.n or 1, seed, role, layer, lengths)

    def layout(self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0) -> Layout:
        self.require()
        return Layout(nowhere, Extent(), self.draw(self.n or 1, seed, role, layer, lengths))


def nowhere(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The rule that allows nothing."""
    return k < 0
