"""Constrained sparsemax: of the distributions under the bounds the nearest to the scores, `min([z_i - tau]_+, u_i)`."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.attention.transforms._bounded import Bounded, BoundedSpec, OnInfeasible, bounded
from attnbench.attention.transforms.base import ScoreTransform, refuse, transforms
from attnbench.attention.types import Dims

ROUNDS = 12
"""Newton's rounds; a row that still moves then is solved by order."""
TOLERANCE = 16
"""How far from 1 the weights of a row may sum, in units of the last digit."""
FEW = 0.5
"""Below this share of the rows those that still move are gathered; the others stand still meanwhile."""


def csparsemax(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
    on_infeasible: OnInfeasible = "raise",
) -> Float[Tensor, "... K"]:
    """Euclidean projection of each row's valid scores onto the simplex with every weight at most its bound `upper`.

    Source: Malaviya et al. 2018. Raises ValueError for `keep`, and for bounds as `bounded` says.
    """
    refuse("csparsemax", keep=keep)
    return bounded("csparsemax", scores, valid, upper, CSPARSEMAX, on_infeasible)


def newton(scores: Float[Tensor, "N K"], upper: Float[Tensor, "N K"]) -> tuple[Float[Tensor, "N K"], Int[Tensor, "R"]]:
    """Newton's method on F(tau) = `sum min([z - tau]_+, u) - 1`; and the rows that it leaves undone.

    Where its step leaves the bracket, it goes to a point between the bracket's middle and the secant's root; `lerp` by
    1 or 0 picks as `where` does, several times as fast. Rows that are done stand still until the others are few.
    """
    limits = torch.finfo(scores.dtype)
    one, two = torch.empty_like(scores), torch.empty_like(scores)  # for all that is large below
    high = scores.amax(-1, keepdim=True)
    low = torch.nan_to_num(scores, neginf=torch.inf, out=one).amin(-1, keepdim=True)
    total = upper.sum(-1, keepdim=True)
    tau = torch.minimum(high - 0.5, low + (high - low) * (0.85 - 0.7 / total))
    low, at_low, at_high = low - 1, total - 1, torch.full_like(high, -1.0)  # at: F, there or beyond
    whole, rows, thresholds = (scores, upper), torch.arange(len(tau), device=tau.device), torch.empty_like(tau)
    moving = torch.ones_like(tau, dtype=torch.bool)
    for _ in range(ROUNDS):
        part = _clip(torch.sub(scores, tau, out=one[: len(tau)]), upper)
        rest = part.sum(-1, keepdim=True).sub_(1)
        thresholds.index_copy_(0, rows, tau)
        moving = ~(rest.abs() <= TOLERANCE * limits.eps)  # NaN, too: high - low may be more than any float
        going = moving.squeeze(1).nonzero().squeeze(1)
        if len(going) < FEW * len(rows):
            left = (rows, scores, upper, rest, low, high, at_low, at_high, tau, moving)
            rows, scores, upper, rest, low, high, at_low, at_high, tau, moving = (
                each.index_select(0, going) for each in left
            )
            part = torch.index_select(part, 0, going, out=two[: len(going)])
            one, two = two, one
        if not len(going):
            break
        free = torch.sub(upper, part, out=two[: len(rows)]).mul_(part).ceil_()  # u <= MOST, so that (u - p) p <= 1
        over = (rest > 0).to(rest.dtype)
        low, at_low = low.lerp_(tau, over), at_low.lerp_(rest, over)
        high, at_high = tau.lerp(high, over), rest.lerp(at_high, over)
        guess = tau + rest / free.sum(-1, keepdim=True).clamp_min_(limits.eps)
        within = (guess > low).logical_and_(guess < high).to(rest.dtype)
        inner = low + (high - low) * (0.7 * at_low / (at_low - at_high) + 0.15)
        tau = tau.lerp(inner.lerp_(guess, within), moving.to(tau.dtype))
    else:
        rows = rows[moving.squeeze(1)]
    weights = _clip(torch.sub(whole[0], thresholds), whole[1])
    return (weights, rows) if not len(rows) else _mended(weights, thresholds, rows, *whole)


def _mended(
    weights: Float[Tensor, "N K"],
    thresholds: Float[Tensor, "N 1"],
    rows: Int[Tensor, "R"],
    scores: Float[Tensor, "N K"],
    upper: Float[Tensor, "N K"],
) -> tuple[Float[Tensor, "N K"], Int[Tensor, "S"]]:
    """One more step on some rows, and those that it does not end.

    The step is not added to tau, whose last digit may be larger than a weight: under tight bounds it lies far from
    every large score.
    """
    upper = upper[rows]
    above = scores[rows] - thresholds[rows]
    part = _clip(above.clone(), upper)
    free = ((part > 0) & (part < upper)).sum(-1, keepdim=True).clamp_min(1)
    part = _clip(above - (part.sum(-1, keepdim=True) - 1) / free, upper)
    off = ~((part.sum(-1) - 1).abs() <= TOLERANCE * torch.finfo(part.dtype).eps)
    return weights.index_copy_(0, rows, part), rows[off]


def _clip(above: Float[Tensor, "N K"], upper: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """`min([z - tau]_+, u)`, in place."""
    return torch.minimum(above.relu_(), upper, out=above)


def exact(scores: Float[Tensor, "N K"], upper: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """The same by order, whatever the scale: no threshold is ever rounded.

    F(tau) = `sum min([z - tau]_+, u)` falls in tau. Bisection over the sorted scores finds the least score s with
    F(s) < 1. With tau = s - t no further key enters until F reaches 1, so that F is concave in t, and Newton's method
    from t = 0 never oversteps; every round but the last brings a key to its bound.
    """
    alive = upper > 0
    first, last = torch.zeros_like(alive[:, :1], dtype=torch.long), alive.sum(-1, keepdim=True) - 1
    ordered = scores.sort(-1, descending=True).values
    while bool((first < last).any()):
        middle = (first + last + 1) // 2
        mass = torch.minimum((scores - ordered.gather(-1, middle)).relu_(), upper).sum(-1, keepdim=True)
        under = mass < 1
        first, last = torch.where(under, middle, first), torch.where(under, last, middle - 1)
    above = (scores - ordered.gather(-1, first)).masked_fill_(~alive, -torch.inf)
    entered = above >= 0
    t = torch.zeros_like(above[:, :1])
    weights = torch.zeros_like(scores)
    for _ in range(scores.shape[-1] + 1):
        weights = torch.minimum(above + t, upper).masked_fill_(~entered, 0.0)
        free = (entered & (above + t < upper)).sum(-1, keepdim=True)
        step = ((1 - weights.sum(-1, keepdim=True)) / free.clamp_min(1)).masked_fill_(free == 0, 0.0).clamp_min_(0.0)
        if not bool((step > torch.finfo(t.dtype).eps).any()):
            break
        t = t + step
    return weights


def slope(weights: Float[Tensor, "... K"], free: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """q = 1 at free keys."""
    return free


CSPARSEMAX = Bounded("csparsemax", newton, exact, slope)


@transforms.register
class CsparsemaxSpec(BoundedSpec):
    """Sparsemax with a bound on each weight: what a source word may still receive."""

    kind: Literal["csparsemax"] = "csparsemax"
    paper: ClassVar[str] = "Malaviya et al. 2018"

    def build(self, dims: Dims) -> ScoreTransform:
        return partial(csparsemax, on_infeasible=self.on_infeasible)
