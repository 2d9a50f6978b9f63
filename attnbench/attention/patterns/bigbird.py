"""BigBird's pattern, position by position: a window, global positions and random ones."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from jaxtyping import Int
from torch import Tensor

from attnbench.attention.patterns._drawn import Drawn, DrawnSpec
from attnbench.attention.patterns._fixed import reach
from attnbench.attention.patterns.base import Extent, Layout, patterns
from attnbench.attention.patterns.global_tokens import GlobalSpec
from attnbench.attention.patterns.window import WindowSpec
from attnbench.attention.types import MaskMod, Role


@patterns.register
class BigBirdSpec(DrawnSpec):
    """Half of n as a window, a quarter as global positions (from n = 4 on), the rest drawn from what both leave."""

    kind: Literal["bigbird"] = "bigbird"
    paper: ClassVar[str] = "Zaheer et al. 2020, by positions; Extremely Sparse Transformer, section 4.3"

    def most(self, role: Role) -> int | None:
        return self.n if role == "decoder_self" else None  # elsewhere the first positions look at all

    def mask_mod(
        self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0
    ) -> MaskMod:
        fixed = self._fixed(role)
        drawn = self._draw(fixed, role, layer, lengths, seed)
        return lambda b, h, q, k: fixed(b, h, q, k) | drawn(b, h, q, k)

    def layout(self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0) -> Layout:
        fixed = self._fixed(role)
        return Layout(fixed, fixed.extent, self._draw(fixed, role, layer, lengths, seed))

    def _fixed(self, role: Role) -> _Fixed:
        self.require()
        n = self.n or 1
        return _Fixed(n // 2, n // 4, role == "decoder_self")

    def _draw(self, fixed: _Fixed, role: Role, layer: int, lengths: Int[Tensor, "B"] | None, seed: int) -> Drawn:
        return self.draw((self.n or 1) - fixed.window - fixed.tokens, seed, role, layer, lengths, fixed.extent)


_GLOBAL, _WINDOW = GlobalSpec(), WindowSpec()


class _Fixed(NamedTuple):
    """The rule of the window and of the first positions."""

    window: int
    tokens: int
    causal: bool

    @property
    def extent(self) -> Extent:
        first, last = reach(self.window, causal=self.causal) if self.window else (0, -1)
        return Extent(first, last, tokens=self.tokens)

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = _GLOBAL.near(q, k, self.tokens, causal=self.causal) if self.tokens else k < 0
        near = near | _WINDOW.near(q, k, self.window, causal=self.causal) if self.window else near
        return near & (k <= q) if self.causal else near
