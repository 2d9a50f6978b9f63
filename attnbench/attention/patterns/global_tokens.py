"""The global pattern: the first n positions look at all, and all look at them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from attnbench.attention.patterns._fixed import FixedSpec
from attnbench.attention.patterns.base import Extent, patterns
from attnbench.attention.types import Role


@patterns.register
class GlobalSpec(FixedSpec):
    """The first n positions attend to all and are attended to by all; others see nothing else, not even themselves."""

    kind: Literal["global"] = "global"

    def most(self, role: Role) -> int | None:
        return self.n if role == "decoder_self" else None  # elsewhere the first positions look at all

    def near(self, q: Tensor, k: Tensor, n: int, *, causal: bool) -> Tensor:
        return (k < n) | (q < n)

    def extent(self, n: int, *, causal: bool) -> Extent:
        return Extent(tokens=n)
