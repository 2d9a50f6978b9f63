"""Top-k out of window: softmax over a window of neighbours and the best keys outside it."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from attnbench.attention.patterns.base import PatternSpec
from attnbench.attention.patterns.window import WindowSpec
from attnbench.attention.transforms._simplex import Normaliser, centre, mask, normalise, renormalise
from attnbench.attention.transforms.base import Fused, ScoreTransform, TransformSpec, check_mask, refuse, transforms
from attnbench.attention.transforms.softmax import slope
from attnbench.attention.transforms.topk import largest
from attnbench.attention.types import MOST_POSITIONS, Dims, Role


def topk_oow(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
    k: int,
) -> Float[Tensor, "... K"]:
    """Softmax over the valid keys in `keep` and the k best valid ones outside it; of ties all are kept.

    A row with fewer than k valid keys outside keeps all of them; without `keep` there is no window, and this is top-k.
    The k-th best is a constant in the gradient. Source: Extremely Sparse Transformer, section 4. Raises ValueError for
    k < 1 or `upper`.
    """
    refuse("topk_oow", upper=upper)
    check_mask("keep", keep, scores)
    if k < 1:
        raise ValueError(f"topk_oow keeps k >= 1 keys outside the window, not {k}")
    fused = Fused("topk", min(k, scores.shape[-1]), keep)
    return normalise(scores, valid, Normaliser(partial(_weigh, k=k, keep=keep), slope, fused))


def _weigh(masked: Float[Tensor, "... K"], *, k: int, keep: Bool[Tensor, "..."] | None) -> Float[Tensor, "... K"]:
    outside = masked if keep is None else mask(masked, ~keep)
    chosen = (masked.amax(-1, keepdim=True) == torch.inf).to(masked.dtype)  # a spoilt row: all of it must become NaN
    if keep is not None:
        chosen = torch.maximum(chosen, keep.to(masked.dtype))
    kth = largest(outside, min(k, masked.shape[-1]))[..., :1]
    best = torch.ge(outside, kth, out=torch.empty_like(masked))  # a dead key too, perhaps, whose weight is 0
    return renormalise(centre(masked).exp_().mul_(torch.maximum(chosen, best)))


@transforms.register
class TopKOutOfWindowSpec(TransformSpec):
    """Half of n as a window, which the site brings (`keep`), the rest as the best keys outside it."""

    kind: Literal["topk_oow"] = "topk_oow"
    roles: ClassVar[frozenset[Role]] = frozenset({"encoder_self", "decoder_self"})
    paper: ClassVar[str] = "Extremely Sparse Transformer, section 4 (top-k out of window)"

    n: int | None = Field(default=None, ge=1, le=MOST_POSITIONS)
    """Keys that a row keeps in all."""

    def require(self) -> None:
        if self.n is None:
            raise ValueError("topk_oow needs to know how many keys a row keeps: give n or a budget")

    def keep(self, role: Role) -> PatternSpec | None:
        window = (self.n or 1) // 2
        return WindowSpec(n=window) if window else None

    def is_softmax(self, keys: int | None = None) -> bool:
        n = self.n or 1
        return keys is not None and n - n // 2 >= keys

    def build(self, dims: Dims) -> ScoreTransform:
        self.require()
        n = self.n or 1
        return partial(topk_oow, k=n - n // 2)

    def fused(self, built: ScoreTransform) -> Fused:
        n = self.n or 1
        return Fused("topk", n - n // 2)

    @classmethod
    def from_budget(cls, n: int, role: Role) -> Self | None:
        return cls(n=n)
