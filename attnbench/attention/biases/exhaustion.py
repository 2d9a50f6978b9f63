"""Exhaustion: keys that may still receive much are preferred."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from attnbench.attention.biases.base import Bias, BiasSpec, biases
from attnbench.attention.types import Dims, Positions, Role


class Exhaustion(Bias):
    """`c * u`, u what each key may still receive, as a constant; 0 for a key that never ends (the sink)."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.c = c

    def forward(self, positions: Positions, left: Float[Tensor, "B #H Q K"] | None) -> Float[Tensor, "B #H Q K"]:
        if left is None:
            raise ValueError("exhaustion needs to know what each key may still receive")
        return self.c * left.detach().nan_to_num(posinf=0.0)


@biases.register
class ExhaustionSpec(BiasSpec):
    """Adds c times the fertility left, so that words are spent before the sentence ends."""

    kind: Literal["exhaustion"] = "exhaustion"
    roles: ClassVar[frozenset[Role]] = frozenset({"cross"})
    needs_upper: ClassVar[bool] = True
    paper: ClassVar[str] = "Malaviya et al. 2018"

    c: float = Field(default=0.2, allow_inf_nan=False)
    """The paper's c."""

    def build(self, dims: Dims) -> Exhaustion:
        return Exhaustion(self.c)
