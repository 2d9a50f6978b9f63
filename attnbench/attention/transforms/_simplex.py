"""What every transform onto the simplex shares: masking, the Jacobian, and rows that are empty or spoilt.

Each of them solves `p = argmax_p <p, z> + H(p)` for some entropy H, and so has the Jacobian

    dp/dz = diag(q) - q q^T / sum(q),    q_i = 1 / -H''(p_i) on the support, 0 off it

(Peters et al. 2019, proposition 2): q = p for softmax, 1 for sparsemax, p^(2-a) for a-entmax.

Masks are applied by minima and clamps of float bounds: on CPUs these are vectorised, `where` and `masked_fill` are not
(measured: ten to twenty times slower). Nothing here is NaN unless the caller's scores are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms import _rows_gpu, rowwise
from attnbench.attention.transforms.base import Fused, check_mask, widen
from attnbench.core.derivatives import once_differentiable

ROUNDS = 64
"""Bound of the root searches, which end by themselves when no threshold moves (random rows: after 4 to 7 rounds)."""
STILL = 8
"""Units in the last place of 1, up to which masses are as near to 1 as rounding lets them be."""


class Normaliser(NamedTuple):
    """weigh: masked scores, which it may overwrite -> weights. slope: weights -> q of the Jacobian.

    fused: the compiled transform that gives the same, where there is one.
    """

    weigh: Callable[[Float[Tensor, "... K"]], Float[Tensor, "... K"]]
    slope: Callable[[Float[Tensor, "... K"]], Float[Tensor, "... K"]]
    fused: Fused | None = None


def mask(scores: Float[Tensor, "... K"], valid: Bool[Tensor, "..."] | None) -> Float[Tensor, "... K"]:
    """Scores with -inf at dead keys and +inf for NaN: free of NaN. Not differentiable."""
    clean = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
    if valid is None:
        return clean
    bound = torch.where(valid, torch.inf, -torch.inf).to(clean.dtype)
    return torch.minimum(clean, bound, out=clean)


def centre(masked: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """Scores minus the row's largest, in place. Dead keys hold -inf; so does every key of an empty row. Living keys of
    a row that must come out NaN hold +inf."""
    top = masked.amax(-1, keepdim=True)
    spoilt = top == torch.inf
    if not _answers_at_once(spoilt) or bool(spoilt.any()):
        masked.masked_fill_(spoilt & (masked > -torch.inf), torch.inf)
    return masked.sub_(top.nan_to_num_(posinf=0.0, neginf=0.0))


def _answers_at_once(tensor: Tensor) -> bool:
    """A GPU would be waited for, and a graph broken."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


def climb(threshold: Float[Tensor, "... 1"], step: Float[Tensor, "... 1"]) -> Float[Tensor, "... 1"]:
    """The threshold, moved up by that step. Rows that are empty or spoilt stand still."""
    return threshold + step.nan_to_num_(0.0, 0.0, 0.0).clamp_min_(0.0)


def exceeds(excess: Float[Tensor, "... 1"]) -> Bool[Tensor, "... 1"]:
    """Whether it is more than rounding leaves."""
    return excess > STILL * torch.finfo(excess.dtype).eps


def renormalise(mass: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """Masses made to sum to 1, in place: empty rows stay 0; an infinite mass becomes NaN, zeros beside it stay 0."""
    return mass.div_(mass.sum(-1, keepdim=True).clamp_min_(torch.finfo(mass.dtype).tiny))


def vjp(grad: Float[Tensor, "... K"], slope: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """The gradient at the scores: `q * (g - <q, g> / sum q)`; exactly 0 where q is, whatever g holds there."""
    taken = mask_gradient(grad, slope).mul_(slope)
    total = slope.sum(-1, keepdim=True).clamp_min_(torch.finfo(slope.dtype).tiny)
    mean = taken.sum(-1, keepdim=True).div_(total).nan_to_num_(0.0, 0.0, 0.0)  # in a spoilt row q and taken are NaN
    return taken.addcmul_(slope, mean, value=-1)


def mask_gradient(grad: Float[Tensor, "... K"], slope: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """The gradient with 0 where slope is 0: a masked value may hold NaN, and 0 times NaN is NaN."""
    largest = torch.finfo(slope.dtype).max
    bound = (slope * largest).mul_(largest)  # inf, or 0 where slope is 0
    heeded = grad.nan_to_num(torch.inf, torch.inf, -torch.inf)
    torch.minimum(heeded, bound, out=heeded)
    return torch.maximum(heeded, bound.neg_(), out=heeded)


def engine(scores: Float[Tensor, "... K"]) -> Any:
    """The module of compiled transforms that takes these scores; None: torch operations serve."""
    return next((each for each in (rowwise, _rows_gpu) if each.serves(scores)), None)


class _Simplex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, valid: Tensor | None, normaliser: Normaliser) -> Tensor:
        ctx.engine, ctx.fused = None if normaliser.fused is None else engine(scores), normaliser.fused
        if ctx.engine is not None:
            weights = ctx.engine.weigh(scores, valid, ctx.fused)
        else:
            weights = normaliser.weigh(mask(scores, valid))
        ctx.save_for_backward(weights)
        ctx.slope = normaliser.slope
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weights,) = ctx.saved_tensors
        if ctx.engine is not None:
            return ctx.engine.vjp(grads[0], weights, ctx.fused)[0], None, None
        return vjp(grads[0], ctx.slope(weights)), None, None


def normalise(
    scores: Float[Tensor, "... K"], valid: Bool[Tensor, "..."] | None, normaliser: Normaliser
) -> Float[Tensor, "... K"]:
    """Weights of each row, in the dtype of the scores, under the rules of base.py. Raises ValueError for a bad mask."""
    check_mask("valid", valid, scores)
    if scores.shape[-1] == 0:
        return scores.clone()
    weights: Tensor = _Simplex.apply(widen(scores), valid, normaliser)  # pyright: ignore[reportAssignmentType]
    return weights.to(scores.dtype)
