"""The dilated pattern: a window with gaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field
from torch import Tensor

from attnbench.attention.patterns._fixed import FixedSpec, reach
from attnbench.attention.patterns.base import Extent, patterns
from attnbench.attention.types import MOST_POSITIONS, Role


@patterns.register
class DilatedSpec(FixedSpec):
    """A window of n positions, every `dilation`-th of the sequence: with 2, the position itself and none beside it."""

    kind: Literal["dilated"] = "dilated"

    dilation: int = Field(default=2, ge=1, le=MOST_POSITIONS)
    """Steps from one attended position to the next; 1 is the window."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.n == 1 and self.is_set("dilation"):
            yield "dilation", "n is 1, the position itself"

    def most(self, role: Role) -> int | None:
        return self.n

    def near(self, q: Tensor, k: Tensor, n: int, *, causal: bool) -> Tensor:
        first, last = (self.dilation * end for end in reach(n, causal=causal))
        apart = k - q
        return (apart >= first) & (apart <= last) & (apart % self.dilation == 0)

    def extent(self, n: int, *, causal: bool) -> Extent:
        first, last = reach(n, causal=causal)
        return Extent(first * self.dilation, last * self.dilation)
