"""Rectified top-k: the k best keys share the weight in proportion to how far they rise above the worst of them."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from attnbench.attention.transforms.base import ScoreTransform, TransformSpec, finish, prepare, refuse, transforms
from attnbench.attention.types import Dims, Role


def rectified(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
    k: int = 8,
) -> Float[Tensor, "... K"]:
    """`p_i = m_i / sum_j m_j` with `m_i = 1 + z_i - t` where `z_i >= t`, else 0; t is the k-th largest valid score."""
    refuse("rectified", keep=keep, upper=upper)
    if scores.shape[-1] == 0:
        return scores.clone()
    rows, alive = prepare(scores, valid)
    best = rows.topk(min(k, rows.shape[-1])).values
    worst = best.masked_fill(best == -torch.inf, torch.inf).amin(-1, keepdim=True)  # of rows with fewer keys: the last
    mass = (rows - worst + 1).masked_fill(rows < worst, 0.0)
    return finish(mass / mass.sum(-1, keepdim=True).clamp(min=1), alive, scores)


@transforms.register
class RectifiedSpec(TransformSpec):
    """The k best keys, weighted by how far they rise above the worst of them."""

    kind: Literal["rectified"] = "rectified"
    paper: ClassVar[str] = "none: an example"

    k: int = Field(default=8, ge=1)
    """Keys that a row keeps."""

    def build(self, dims: Dims) -> ScoreTransform:
        return partial(rectified, k=self.k)

    @classmethod
    def from_budget(cls, n: int, role: Role) -> Self | None:
        return cls(k=n)
