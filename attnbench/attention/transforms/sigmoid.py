"""Sigmoid: every key has a gate of its own, `p_i = 1 / (1 + e^{-z_i})`; a row need not sum to 1."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms import rowwise
from attnbench.attention.transforms._simplex import mask, mask_gradient
from attnbench.attention.transforms.base import (
    Fused,
    ScoreTransform,
    TransformSpec,
    check_mask,
    refuse,
    transforms,
    widen,
)
from attnbench.attention.types import Dims
from attnbench.core.derivatives import once_differentiable


def sigmoid(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, "... K"]:
    """Elementwise over the valid keys; `keep` changes nothing, since every valid key is attended."""
    refuse("sigmoid", upper=upper)
    check_mask("valid", valid, scores)
    if scores.shape[-1] == 0:
        return scores.clone()
    weights: Tensor = _Gates.apply(widen(scores), valid)  # pyright: ignore[reportAssignmentType]
    return weights.to(scores.dtype)


_FUSED = Fused("sigmoid")


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, valid: Tensor | None) -> Tensor:
        ctx.compiled = rowwise.serves(scores)
        if ctx.compiled:
            weights = rowwise.weigh(scores, valid, _FUSED)
            ctx.save_for_backward(weights)
            return weights
        masked = mask(scores, valid)
        weights = torch.sigmoid(masked)
        spoilt = masked.amax(-1, keepdim=True) == torch.inf
        if weights.device.type != "cpu" or bool(spoilt.any()):  # elsewhere the question would wait for the device
            weights.masked_fill_(spoilt & (masked > -torch.inf), torch.nan)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weights,) = ctx.saved_tensors
        if ctx.compiled:
            return rowwise.vjp(grads[0], weights, _FUSED)[0], None
        slope = torch.addcmul(weights, weights, weights, value=-1)
        if grads[0].device.type == "cpu" and bool(grads[0].sum().isfinite()):
            return grads[0] * slope, None
        return mask_gradient(grads[0], slope).mul_(slope), None


@transforms.register
class SigmoidSpec(TransformSpec):
    """A gate between 0 and 1 for each key; rows need not sum to 1."""

    kind: Literal["sigmoid"] = "sigmoid"
    rows: ClassVar[Literal["simplex", "gates"]] = "gates"
    paper: ClassVar[str] = "Britz et al. 2017 (Fixed-Size Memory), section 3.2"

    def build(self, dims: Dims) -> ScoreTransform:
        return sigmoid

    def fused(self, built: ScoreTransform) -> Fused:
        return _FUSED
