"""alpha-entmax: from softmax (alpha = 1) through 1.5-entmax to sparsemax (2) and beyond; alpha fixed or learned."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field, field_validator
from torch import Tensor, nn

from attnbench.attention.transforms._entmax import LearnedEntmaxFunction, slope, weigh
from attnbench.attention.transforms._simplex import Normaliser, normalise
from attnbench.attention.transforms.base import (
    SOFTMAX_BELOW,
    Fused,
    ScoreTransform,
    TransformSpec,
    check_mask,
    refuse,
    transforms,
    widen,
)
from attnbench.attention.transforms.entmax15 import ENTMAX15
from attnbench.attention.transforms.softmax import SOFTMAX
from attnbench.attention.transforms.sparsemax import SPARSEMAX
from attnbench.attention.types import Dims


def entmax(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
    alpha: float = 1.5,
) -> Float[Tensor, "... K"]:
    """alpha-entmax of each row's valid scores: softmax up to alpha = 1.0001, exact at 1.5 and 2, else to rounding.

    From alpha = 6 or so a small weight hangs on digits of the scores that float64 does not have: it is the power
    1/(alpha - 1) of how far a score lies above the threshold.

    Source: Peters et al. 2019, eq. 10 and appendix. Raises ValueError for alpha < 1, `keep` and `upper`.
    """
    refuse("entmax", keep=keep, upper=upper)
    return normalise(scores, valid, _normaliser(float(alpha)))


def _normaliser(alpha: float) -> Normaliser:
    if not 1 <= alpha < math.inf:
        raise ValueError(f"entmax takes a finite alpha from 1 on, not {alpha}")
    excess = alpha - 1
    if excess <= SOFTMAX_BELOW:
        return SOFTMAX
    exact = {1.5: ENTMAX15, 2.0: SPARSEMAX}.get(alpha)
    fused = Fused("entmax", excess=excess) if excess <= 1 else None
    return exact or Normaliser(partial(weigh, excess=excess), partial(slope, excess=excess), fused)


class LearnedEntmax(nn.Module):
    """alpha-entmax with an alpha in (1, 2) per head that is trained: `alpha = 1 + sigmoid(raw)`, 1.5 at first.

    Source: Correia et al. 2019, section 3.1.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.raw = nn.Parameter(torch.zeros(heads))

    @property
    def alpha(self) -> Float[Tensor, "H"]:
        return 1 + torch.sigmoid(self.raw)

    def forward(
        self,
        scores: Float[Tensor, "... K"],
        *,
        valid: Bool[Tensor, "..."] | None = None,
        keep: Bool[Tensor, "..."] | None = None,
        upper: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "... K"]:
        """Weights of each row. Raises ValueError when dimension -3 of the scores is not the heads."""
        refuse("entmax", keep=keep, upper=upper)
        check_mask("valid", valid, scores)
        if scores.shape[-1] == 0:
            return scores.clone()
        wide = widen(scores)
        excess = torch.sigmoid(self.raw.to(wide.dtype))
        if self.heads > 1:
            if scores.dim() < 3 or scores.shape[-3] != self.heads:
                shape = tuple(scores.shape)
                raise ValueError(f"entmax learned for {self.heads} heads needs scores [B, H, Q, K], not {shape}")
            excess = excess.view(-1, 1, 1)
        weights: Tensor = LearnedEntmaxFunction.apply(wide, excess, valid)  # pyright: ignore[reportAssignmentType]
        return weights.to(scores.dtype)

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


@transforms.register
class EntmaxSpec(TransformSpec):
    """alpha-entmax: alpha says how sparse, and can be learned for each head."""

    kind: Literal["entmax"] = "entmax"
    paper: ClassVar[str] = "Peters et al. 2019; Correia et al. 2019 (learned alpha)"

    alpha: Annotated[float, Field(ge=1, allow_inf_nan=False)] | Literal["learned"] = 1.5
    """1 is softmax, 2 is sparsemax, more is sparser; `learned`: one per head in (1, 2), 1.5 at first."""

    @field_validator("alpha", mode="before")
    @classmethod
    def _number_or_learned(cls, value: object) -> object:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value < math.inf
        if not number and value != "learned":
            raise ValueError(f"alpha is 'learned' or a finite number from 1 on, not {value!r}")
        return value

    def build(self, dims: Dims) -> ScoreTransform:
        return LearnedEntmax(dims.heads) if self.alpha == "learned" else partial(entmax, alpha=float(self.alpha))

    def is_softmax(self, keys: int | None = None) -> bool:
        return super().is_softmax(keys) or (self.alpha != "learned" and _normaliser(float(self.alpha)) is SOFTMAX)

    def fused(self, built: ScoreTransform) -> Fused | None:
        if isinstance(built, LearnedEntmax):
            return Fused("entmax", excess=torch.sigmoid(built.raw).view(-1, 1, 1))
        return _normaliser(float(self.alpha)).fused
