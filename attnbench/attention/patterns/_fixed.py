"""What fixed patterns share: a number of positions n, and causality on top of their own rule.

Definitions are this project's reading of *Extremely Sparse Transformer*, section 4.3, which has words and a picture: n
counts the attended positions of a row far from both ends, at the ends rows are cut off and never wrapped.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Self

from jaxtyping import Int
from pydantic import Field
from torch import Tensor

from attnbench.attention.patterns.base import Extent, Layout, PatternSpec, hashable
from attnbench.attention.types import MOST_POSITIONS, MaskMod, Role
from attnbench.core.inherit import is_outdated
from attnbench.core.registry import unwritten


class FixedSpec(PatternSpec):
    """A pattern of n positions a row, which says where one may look by `near` alone."""

    roles: ClassVar[frozenset[Role]] = frozenset({"encoder_self", "decoder_self"})
    sparse: ClassVar[bool] = True
    paper: ClassVar[str] = "Extremely Sparse Transformer, section 4.3"

    n: int | None = Field(default=None, ge=1, le=MOST_POSITIONS)
    """Attended positions of a row that is far from both ends."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if is_outdated(cls, "extent", "near") and is_outdated(cls, "layout", "near"):
            cls._lies_anywhere()
        if is_outdated(cls, "most", "near"):
            cls.most = PatternSpec.most

    @classmethod
    def from_budget(cls, n: int, role: Role) -> Self | None:
        return cls.model_validate({"n": n}) if role in cls.roles else None

    def require(self) -> None:
        if self.n is None:
            raise ValueError(f"{self.kind} needs to know how many positions a row attends to: give n or a budget")

    def near(self, q: Tensor, k: Tensor, n: int, *, causal: bool) -> Tensor:
        """Elementwise, without causality: whether position q may look at k."""
        raise unwritten(self, "near")

    def extent(self, n: int, *, causal: bool) -> Extent:
        """Where the keys lie that `near` allows."""
        raise unwritten(self, "extent")

    def mask_mod(
        self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0
    ) -> MaskMod:
        self.require()
        make = _rule if hashable(self) else _rule.__wrapped__
        return make(self, self.n or 1, role == "decoder_self")  # pyright: ignore[reportArgumentType] - it is frozen

    def layout(self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0) -> Layout:
        return Layout(self.mask_mod(role, layer), self.extent(self.n or 1, causal=role == "decoder_self"))


@functools.lru_cache(maxsize=256)
def _rule(pattern: FixedSpec, n: int, causal: bool) -> MaskMod:
    """One and the same function for all layers, since block masks are kept by it."""

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = pattern.near(q, k, n, causal=causal)
        return near & (k <= q) if causal else near

    return rule


def reach(n: int, *, causal: bool) -> tuple[int, int]:
    """The offsets (first, last) of n neighbours, the position itself among them: `-floor(n/2) .. floor((n-1)/2)`, or
    the n last ones."""
    return (-(n - 1), 0) if causal else (-(n // 2), (n - 1) // 2)
