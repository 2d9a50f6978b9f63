"""The random pattern: each row draws n of its keys, once and for all."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from attnbench.attention.patterns._drawn import Drawn
from attnbench.attention.patterns._fixed import FixedSpec
from attnbench.attention.patterns.base import patterns
from attnbench.attention.types import ROLES, MaskMod, Role


@patterns.register
class RandomSpec(FixedSpec):
    """n keys a row, drawn without replacement from those that exist; other heads and layers draw others."""

    kind: Literal["random"] = "random"
    roles: ClassVar[frozenset[Role]] = frozenset(ROLES)
    drawn: ClassVar[bool] = True

    seed: int | None = Field(default=None, ge=0)
    """Of the draw; left out: the run's."""

    def mask_mod(
        self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0
    ) -> MaskMod:
        self.require()
        if role != "decoder_self" and lengths is None:
            raise ValueError(f"the pattern '{self.kind}' draws from the keys that there are: give their lengths")
        chosen = seed if self.seed is None else self.seed
        return Drawn(self.n or 1, chosen, role, layer, lengths)
