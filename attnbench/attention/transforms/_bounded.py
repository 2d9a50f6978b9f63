"""What transforms with bounds on the weights share: the rules for bounds, the Jacobians, rows that end early.

Each of them solves `p = argmax <p, z> + H(p)` over the simplex cut by `p <= u`. With F the keys strictly between 0 and
their bound, A those at their bound, and q = 1 / -H''(p) on F (0 off it), the gradient g at p gives

    mean = sum_F q g / sum_F q,    dz = q (g - mean),    du = g - mean on A, 0 off it,

and nothing moves where F is empty. At u = 0 the derivative is one-sided: 0 here.

Masks are arithmetic on floats where it counts: on CPUs comparisons and `where` cost many times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.attention.transforms import _bounded_gpu, _bounded_rows
from attnbench.attention.transforms._bounded_rows import BoundedKind
from attnbench.attention.transforms._simplex import mask, mask_gradient
from attnbench.attention.transforms.base import TransformSpec, check_mask, widen
from attnbench.attention.types import Role
from attnbench.core import waiting
from attnbench.core.derivatives import once_differentiable

OnInfeasible = Literal["raise", "saturate"]

MOST = 2.0
"""Bounds above it are as good as none; it is finite."""
FEASIBLE = 1e-6
"""Bounds that sum to less than 1 by more than this leave no solution; within it of 1 they are the solution."""


class Bounded(NamedTuple):
    """How one transform is solved, on rows `[N, K]` that have a solution with a free key.

    scores: -inf at keys that get no weight. upper: in [0, MOST], 0 at those keys.
    fast: weights, and the rows that it leaves to `exact`. exact: the definition, which `fast` is tested against.
    slope: weights, and 1 at free keys -> q of the Jacobian. kind: what the compiled path knows it by.
    """

    kind: BoundedKind
    fast: Callable[[Float[Tensor, "N K"], Float[Tensor, "N K"]], tuple[Float[Tensor, "N K"], Int[Tensor, "R"]]]
    exact: Callable[[Float[Tensor, "N K"], Float[Tensor, "N K"]], Float[Tensor, "N K"]]
    slope: Callable[[Float[Tensor, "... K"], Float[Tensor, "... K"]], Float[Tensor, "... K"]]


class BoundedSpec(TransformSpec):
    """What the specs of these transforms have in common."""

    roles: ClassVar[frozenset[Role]] = frozenset({"cross"})
    needs_upper: ClassVar[bool] = True

    on_infeasible: OnInfeasible = "raise"
    """A row whose bounds sum to less than 1: an error, or the bounds themselves as weights (`saturate`). In a decoder,
    where the sink has no end, no row is such."""

    @property
    def may_fail(self) -> bool:
        return self.on_infeasible == "raise"


class _Solution(NamedTuple):
    weights: Float[Tensor, "N K"]
    upper: Float[Tensor, "N K"]
    short: Bool[Tensor, "N"]
    """Rows whose bounds sum to less than 1."""


def _solve(
    transform: Bounded, scores: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"] | None, upper: Float[Tensor, "N K"]
) -> _Solution:
    if _bounded_gpu.serves(scores, upper):
        return _Solution(*_bounded_gpu.solve(transform.kind, scores, valid, upper))
    if not _bounded_rows.serves(scores, upper):
        return _in_torch(transform, scores, valid, upper)
    weights, bound, rows = _bounded_rows.solve(transform.kind, scores, valid, upper)
    short = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    if len(rows):
        others = _in_torch(transform, scores[rows], None if valid is None else valid[rows], upper[rows])
        for whole, part in zip((weights, bound, short), others, strict=True):
            whole[rows] = part
    return _Solution(weights, bound, short)


def _in_torch(
    transform: Bounded, scores: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"] | None, upper: Float[Tensor, "N K"]
) -> _Solution:
    masked = mask(scores, valid)
    top = masked.amax(-1)
    alive = torch.gt(masked, -torch.inf, out=torch.empty_like(masked))  # 1 or 0
    bound = torch.threshold_(torch.minimum(upper, alive.mul_(MOST)), 2 * torch.finfo(upper.dtype).tiny, 0.0)
    masked = torch.minimum(masked, _barrier(bound), out=masked)
    total = bound.sum(-1)
    spoilt = top == torch.inf
    short = (total < 1 - FEASIBLE) & (top > -torch.inf)
    decided = (total <= 1 + FEASIBLE) | spoilt
    if not bool(decided.any()):
        return _Solution(_to_the_end(transform, masked, bound), bound, short)
    weights = torch.where(spoilt[:, None] & (alive > 0), torch.nan, bound)
    rows = (~decided).nonzero().squeeze(1)
    if len(rows):
        weights[rows] = _to_the_end(transform, masked[rows], bound[rows])
    return _Solution(weights, bound, short)


def _barrier(bound: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """inf where the bound is above 0, -inf where it is 0."""
    limits = torch.finfo(bound.dtype)
    return (bound - limits.tiny).mul_(limits.max).mul_(limits.max)


def _to_the_end(transform: Bounded, scores: Float[Tensor, "N K"], upper: Float[Tensor, "N K"]) -> Tensor:
    weights, rows = transform.fast(scores, upper)
    if len(rows):
        weights[rows] = transform.exact(scores[rows], upper[rows])
    return weights


class _BoundedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, upper: Tensor, valid: Tensor | None, how: Bounded, on: OnInfeasible
    ) -> Tensor:
        flat = scores.reshape(-1, scores.shape[-1])
        mask_rows = None if valid is None else valid.reshape(flat.shape)
        found = _solve(how, flat, mask_rows, upper.reshape(flat.shape))
        ctx.how, ctx.shape = how, scores.shape
        ctx.compiled, ctx.on_gpu = _bounded_rows.serves(flat), _bounded_gpu.serves(flat)
        if ctx.on_gpu and (on != "raise" or waiting.forbidden()):
            weights = found.weights
            if on == "raise":  # the loss will be NaN, and whoever looks for the place, with all the time, is told why
                weights = weights.masked_fill(found.short[:, None] & (found.upper > 0), torch.nan)
            ctx.save_for_backward(weights, found.upper, found.short)
            return weights.reshape(scores.shape)
        short = bool(found.short.any())
        if short and on == "raise":
            row = int(found.short.nonzero()[0])
            raise ValueError(
                f"the bounds of {int(found.short.sum())} rows sum to less than 1, the first to "
                f"{found.upper[row].sum().item():.6g}, so that no weights can sum to 1; raise the bounds, or give "
                "on_infeasible='saturate' for weights that are the bounds"
            )
        ctx.save_for_backward(found.weights, found.upper, found.short if short or ctx.on_gpu else None)
        return found.weights.reshape(scores.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, upper, short = ctx.saved_tensors
        grad, found = grads[0].reshape(weights.shape), None
        if ctx.on_gpu:
            found = _bounded_gpu.vjp(ctx.how.kind, weights, upper, grad, short)
        elif ctx.compiled:
            found = _bounded_rows.vjp(ctx.how.kind, weights, upper, grad, short, bounds_too=ctx.needs_input_grad[1])
        to_scores, to_upper = found or _vjp(ctx.how, weights, upper, grad, short)
        to_upper = None if to_upper is None else to_upper.reshape(ctx.shape)
        return to_scores.reshape(ctx.shape), to_upper, None, None, None


def _vjp(
    transform: Bounded,
    weights: Float[Tensor, "N K"],
    upper: Float[Tensor, "N K"],
    grad: Float[Tensor, "N K"],
    short: Bool[Tensor, "N"] | None,
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
    """The gradients at scores and bounds."""
    some = weights.ceil()  # of NaN it is NaN, as the sign is not
    free = (upper - weights).ceil_().clamp_max_(1.0).mul_(some)
    heeded = mask_gradient(grad, some)
    slope = transform.slope(weights, free)
    mass = slope.sum(-1, keepdim=True)
    taken = heeded * slope
    mean = taken.sum(-1, keepdim=True).div_(mass.clamp_min(torch.finfo(mass.dtype).tiny))
    mean = mean.nan_to_num_(0.0, 0.0, 0.0)
    to_scores = taken.addcmul_(slope, mean, value=-1)
    moves = mass.sign()
    if short is not None:
        moves = moves.masked_fill(short[:, None], 1.0)  # their mean is 0: all of g
    at_bound = some.sub_(free).mul_(moves)
    return to_scores, heeded.mul_(at_bound).addcmul_(at_bound, mean, value=-1)


def bounded(
    name: str,
    scores: Float[Tensor, "... K"],
    valid: Bool[Tensor, "..."] | None,
    upper: Float[Tensor, "..."] | None,
    how: Bounded,
    on_infeasible: OnInfeasible,
) -> Float[Tensor, "... K"]:
    """Weights of each row, in the dtype of the scores, under the rules of base.py, never above `upper`.

    Raises ValueError for a bad mask, for missing or negative bounds or NaN among them, and, unless `on_infeasible` is
    "saturate", for a row with a valid key whose bounds at valid keys sum to less than 1. Saturated, it gets its bounds.
    """
    check_mask("valid", valid, scores)
    if upper is None:
        raise ValueError(f"the transform '{name}' needs 'upper', a bound on each weight")
    wide = widen(scores)
    try:
        limits = upper.to(wide.dtype).expand(scores.shape)
    except RuntimeError:
        raise ValueError(
            f"'upper' of shape {tuple(upper.shape)} does not broadcast to scores {tuple(scores.shape)}"
        ) from None
    if upper.numel() and not waiting.forbidden() and not float(upper.detach().amin()) >= 0:
        limits = limits if valid is None else limits.masked_fill(~valid, 0.0)  # what is masked may hold anything
        if scores.numel() and not float(limits.detach().amin()) >= 0:
            raise ValueError("'upper' holds a negative number or NaN; a bound on a weight is 0 or more")
    if scores.numel() == 0:
        return scores.clone()
    shown = None if valid is None else valid.expand(scores.shape)
    weights: Tensor = _BoundedFunction.apply(wide, limits, shown, how, on_infeasible)  # pyright: ignore[reportAssignmentType]
    return weights.to(scores.dtype)
