"""The full pattern: every position, or every earlier one where the site is causal."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Int
from torch import Tensor

from attnbench.attention.patterns.base import PatternSpec, causal, patterns
from attnbench.attention.types import MaskMod, Role


@patterns.register
class FullSpec(PatternSpec):
    """No restriction beyond causality."""

    kind: Literal["full"] = "full"
    paper: ClassVar[str] = "Vaswani et al. 2017"

    def mask_mod(
        self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0
    ) -> MaskMod | None:
        return causal if role == "decoder_self" else None
