"""alpha-entmax for any alpha > 1: the root search, and the gradient for alpha.

With e = alpha - 1 and d the scores minus their largest, the weights are

    p_i = [1 + e (d_i - t)]_+^(1/e),   t the root of sum p = 1,

which is `[(alpha - 1) z_i - tau]_+^(1/(alpha - 1))` of Peters et al. 2019 written about the largest score: as e -> 0 it
becomes e^(d_i - t) without loss of digits.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.attention.transforms import entmax15, rowwise, softmax
from attnbench.attention.transforms._simplex import (
    ROUNDS,
    STILL,
    centre,
    climb,
    engine,
    exceeds,
    mask,
    mask_gradient,
    renormalise,
    vjp,
)
from attnbench.attention.transforms.base import SOFTMAX_BELOW, Fused
from attnbench.core.derivatives import once_differentiable

Excess = float | Float[Tensor, "..."]
"""alpha - 1: one for all rows, or a tensor that broadcasts to the scores with a last dimension of 1."""


def weigh(masked: Float[Tensor, "... K"], excess: Excess) -> Float[Tensor, "... K"]:
    """Weights of masked scores for excess > SOFTMAX_BELOW."""
    if isinstance(excess, float) and excess > 1:
        # r^(1/e) makes rounding large: in float32 a hundredth at e = 4; Apple's GPUs have nothing wider
        below = centre((masked.cpu() if masked.device.type == "mps" else masked).double()).mul_(excess)
        mass = _powers(below, _bracketed(below, excess), excess)[0]
    else:
        centred = centre(masked)
        mass = _masses(centred, _climbed(centred, excess), excess)[0]
    return renormalise(mass).to(masked)


def _masses(
    centred: Float[Tensor, "... K"], t: Float[Tensor, "... 1"], excess: Excess
) -> tuple[Float[Tensor, "... K"], Float[Tensor, "... K"]]:
    """The unnormalised weights r^(1/e), and r = [1 + e (d - t)]_+."""
    base = (centred - t).mul_(excess).clamp_min_(-1.0)
    return base.log1p().div_(excess).exp_(), base.add_(1.0)


def _step(
    total: Float[Tensor, "... 1"], mass: Float[Tensor, "... K"], base: Float[Tensor, "... K"], excess: Excess
) -> Float[Tensor, "... 1"]:
    """Newton's step for `(sum p)^e = 1`: the norm of r bends less than sum p, the total.

    Exact in one step on rows of equal scores.
    """
    slope = mass.div(base.clamp_min_(torch.finfo(base.dtype).tiny)).sum(-1, keepdim=True)
    return -total * torch.expm1(-excess * total.log()) / (excess * slope)


def _climbed(centred: Float[Tensor, "... K"], excess: Excess) -> Float[Tensor, "... 1"]:
    """Newton from below for alpha <= 2, where the norm is convex and falls in t, so that t never overshoots."""
    t = 2 * (entmax15.threshold(centred * 0.5) + 1)  # near the root, at a fraction of a round's cost
    mass, base = _masses(centred, t, excess)
    step = _step(mass.sum(-1, keepdim=True), mass, base, excess)
    t = (t + step).nan_to_num_(0.0).clamp_min_(0.0)  # a step from above lands below; 0 is below
    for _ in range(ROUNDS):
        mass, base = _masses(centred, t, excess)
        total = mass.sum(-1, keepdim=True)
        before, t = t, climb(t, _step(total, mass, base, excess))
        if not bool((exceeds(total - 1) & (t > before)).any()):
            break
    return t


def _powers(
    below: Float[Tensor, "... K"], top: Float[Tensor, "... 1"], excess: float
) -> tuple[Float[Tensor, "... K"], Float[Tensor, "... K"]]:
    """The same for alpha > 2, where r of nearly equal scores is as little as K^-e, and 1 - e t would hold no digits of
    it. below: e d. top: r of the largest score."""
    base = (below + top).clamp_min_(0.0)
    return base.pow(1 / excess), base


def _bracketed(below: Float[Tensor, "... K"], excess: float) -> Float[Tensor, "... 1"]:
    """The root for alpha > 2, as r of the largest score: Newton inside a shrinking bracket, for each weight is
    infinitely steep at its threshold."""
    high = torch.ones_like(below[..., :1])
    tolerance, tiny = STILL * torch.finfo(high.dtype).eps, torch.finfo(high.dtype).tiny
    low = torch.full_like(high, max(below.shape[-1] ** -excess, tiny))
    top = high
    for turn in range(4 * ROUNDS):
        mass, base = _powers(below, top, excess)
        total = mass.sum(-1, keepdim=True)
        rest = total - 1
        under = rest < 0
        low, high = torch.where(under, top, low), torch.where(under, high, top)
        middle = low.sqrt() * high.sqrt()
        searching = (rest.abs() > tolerance) & (middle > low) & (middle < high)
        if not bool(searching.any()):
            break
        guess = top - excess * _step(total, mass, base, excess)
        inside = (guess > low) & (guess < high)
        top = torch.where(searching, torch.where(inside, guess, middle) if turn % 3 else middle, top)
    return top


def slope(weights: Float[Tensor, "... K"], excess: Excess) -> Float[Tensor, "... K"]:
    """q = p^(1 - e) on the support, 0 off it."""
    if isinstance(excess, float) and excess > 1:
        return weights.pow(1 - excess).masked_fill_(weights == 0, 0.0)
    some = weights.clamp_min(torch.finfo(weights.dtype).tiny)
    return some.log_().mul_(1 - excess).exp_().mul_(weights.ceil())  # the last factor empties what is off the support


def alpha_gradient(
    grad: Float[Tensor, "... K"], weights: Float[Tensor, "... K"], excess: Float[Tensor, "..."]
) -> Float[Tensor, "... 1"]:
    """`sum_i g_i dp_i/dalpha` of each row, for excess >= 0.

    Correia et al. 2019, proposition 1, `(p_i - q_i/Q)/e^2 - (p_i log p_i - q_i/Q sum_j p_j log p_j)/e` with Q = sum q,
    rewritten so that nothing cancels: with l = log p, v = (p^-e - 1 + e l)/e^2 and <x> = sum_j p_j x_j it is
    `p_i (<v> - v_i + e (v_i <l> - l_i <v>)) / Q`, at e = 0 the limit `-(1/2) p_i (l_i^2 - <l^2>)`.
    """
    heeded = mask_gradient(grad, weights)
    log = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()  # off the support it is multiplied by 0
    x = -excess * log
    bend = log.square() * _second_order(x)
    taken = weights * heeded
    mean_bend, mean_log = (weights * bend).sum(-1, keepdim=True), (weights * log).sum(-1, keepdim=True)
    taken_bend, taken_log = (taken * bend).sum(-1, keepdim=True), (taken * log).sum(-1, keepdim=True)
    normaliser = 1 + (weights * x.expm1()).sum(-1, keepdim=True)
    first = mean_bend * taken.sum(-1, keepdim=True) - taken_bend
    return (first + excess * (mean_log * taken_bend - mean_bend * taken_log)) / normaliser


def _second_order(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`(e^x - 1 - x) / x^2` for x >= 0, by its series below 1/2."""
    near = x.clamp(max=0.5)
    far = x.clamp(min=0.5)
    series = torch.ones_like(x)
    for divisor in range(16 if x.dtype == torch.float64 else 10, 2, -1):  # 1/2 (1 + x/3 (1 + x/4 (1 + ...)))
        series.mul_(near).div_(divisor).add_(1.0)
    closed = (far.expm1() - far).div_(far.square_())
    return torch.lerp(series.div_(2), closed, torch.ge(x, 0.5, out=torch.empty_like(x)))


class LearnedEntmaxFunction(torch.autograd.Function):
    """Weights for an alpha that is learned: excess is a tensor in [0, 1], broadcastable to the scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, excess: Tensor, valid: Tensor | None) -> Tensor:
        ctx.engine = engine(scores)
        if ctx.engine is rowwise and not bool((excess > SOFTMAX_BELOW).all()):  # NaN is not above it
            ctx.engine = None
        if ctx.engine is not None:
            weights = ctx.engine.weigh(scores, valid, Fused("entmax", excess=excess))
            ctx.save_for_backward(weights, excess)
            return weights
        nearly = excess <= SOFTMAX_BELOW
        masked = mask(scores, valid)
        dense = softmax.weigh(masked.clone()) if bool(nearly.any()) else None
        weights = weigh(masked, excess.clamp_min(SOFTMAX_BELOW))
        if dense is not None:
            weights = torch.where(nearly, dense, weights)
        ctx.save_for_backward(weights, excess)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, excess = ctx.saved_tensors
        if ctx.engine is not None:
            needs_scores, needs_alpha = ctx.needs_input_grad[:2]
            fused = Fused("entmax", excess=excess)
            found, alphas = ctx.engine.vjp(grads[0], weights, fused, to_scores=needs_scores, to_excess=needs_alpha)
            return found, None if alphas is None else alphas.sum_to_size(excess.shape), None
        excess = excess.masked_fill(excess <= SOFTMAX_BELOW, 0.0)
        to_scores = vjp(grads[0], slope(weights, excess)) if ctx.needs_input_grad[0] else None
        to_alpha = None
        if ctx.needs_input_grad[1]:
            to_alpha = alpha_gradient(grads[0], weights, excess).sum_to_size(excess.shape)
        return to_scores, to_alpha, None
