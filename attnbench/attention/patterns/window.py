"""The window pattern: a position looks at its n nearest neighbours, itself among them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from attnbench.attention.patterns._fixed import FixedSpec, reach
from attnbench.attention.patterns.base import Extent, patterns
from attnbench.attention.types import Role


@patterns.register
class WindowSpec(FixedSpec):
    """The n nearest positions; of an even n one more before than behind; where it is causal the n last ones."""

    kind: Literal["window"] = "window"

    def most(self, role: Role) -> int | None:
        return self.n

    def near(self, q: Tensor, k: Tensor, n: int, *, causal: bool) -> Tensor:
        first, last = reach(n, causal=causal)
        return (k - q >= first) & (k - q <= last)

    def extent(self, n: int, *, causal: bool) -> Extent:
        first, last = reach(n, causal=causal)
        return Extent(first, last)
