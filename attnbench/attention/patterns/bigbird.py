"""BigBird's pattern, position by position: a window, global positions and random ones."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Int
from torch import Tensor

from attnbench.attention.patterns._drawn import DrawnSpec
from attnbench.attention.patterns.base import patterns
from attnbench.attention.patterns.global_tokens import GlobalSpec
from attnbench.attention.patterns.window import WindowSpec
from attnbench.attention.types import MaskMod, Role


@patterns.register
class BigBirdSpec(DrawnSpec):
    """Half of n as a window, a quarter as global positions (from n = 4 on), the rest drawn from what both leave."""

    kind: Literal["bigbird"] = "bigbird"
    paper: ClassVar[str] = "Zaheer et al. 2020, by positions; Extremely Sparse Transformer, section 4.3"

    def mask_mod(
        self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0
    ) -> MaskMod:
        self.require()
        n, causal = self.n or 1, role == "decoder_self"
        window, first = n // 2, n // 4

        def fixed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            near = GlobalSpec().near(q, k, first, causal=causal) if first else k < 0
            near = near | WindowSpec().near(q, k, window, causal=causal) if window else near
            return near & (k <= q) if causal else near

        drawn = self.draw(n - window - first, seed, role, layer, lengths, outside=fixed)
        return lambda b, h, q, k: fixed(b, h, q, k) | drawn(b, h, q, k)
