"""The block pattern: the sequence is cut into blocks of n, and a position looks at its own block."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from attnbench.attention.patterns._fixed import FixedSpec
from attnbench.attention.patterns.base import Extent, patterns
from attnbench.attention.types import Role


@patterns.register
class BlockSpec(FixedSpec):
    """Blocks of n neighbours that look at each other; where it is causal a row has 1 to n positions."""

    kind: Literal["block"] = "block"

    def most(self, role: Role) -> int | None:
        return self.n

    def near(self, q: Tensor, k: Tensor, n: int, *, causal: bool) -> Tensor:
        return q // n == k // n

    def extent(self, n: int, *, causal: bool) -> Extent:
        return Extent(-(n - 1), 0 if causal else n - 1, block=n)
