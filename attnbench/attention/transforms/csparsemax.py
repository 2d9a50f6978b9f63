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
    """Newton's method on F(tau) = `sum min([z - tau]_+, u) - 1`; and the rows that still move after ROUNDS.

    Where its step leaves the bracket, it goes halfway between the bracket's middle and the secant's root.
    tau is kept as the sum of a large and a small part: under tight bounds it lies far from every large score, and
    z - tau would cancel.
    """
    tolerance = 16 * torch.finfo(scores.dtype).eps
    scalar = torch.float32 if scores.device.type == "mps" else torch.float64
    high = scores.amax(-1, keepdim=True).to(scalar)
    low = scores.nan_to_num(neginf=torch.inf).amin(-1, keepdim=True).to(scalar) - 1
    at_high, at_low = (
        torch.full_like(high, -1.0),
        upper.sum(-1, keepdim=True).to(scalar) - 1,
    )  # F, at low or more
    tau = torch.minimum(high - 0.5, _secant(low, high, at_low, at_high))
    thresholds = torch.empty_like(tau)
    whole, rows = (scores, upper), torch.arange(len(scores), device=scores.device)
    for _ in range(ROUNDS):
        part = _clip(scores, tau, upper)
        rest = part.sum(-1, keepdim=True) - 1
        thresholds.index_copy_(0, rows, tau)
        going = (rest.abs() > tolerance).squeeze(1).nonzero().squeeze(1)
        if len(going) < len(rows):
            left = (rows, scores, upper, part, rest, low, high, at_low, at_high, tau)
            rows, scores, upper, part, rest, low, high, at_low, at_high, tau = (
                each.index_select(0, going) for each in left
            )
        if not len(rows):
            break
        free = (upper - part).sign_().mul_(part.sign_()).sum(-1, keepdim=True)
        over, rest = rest > 0, rest.to(scalar)
        low, at_low = torch.where(over, tau, low), torch.where(over, rest, at_low)
        high, at_high = torch.where(over, high, tau), torch.where(over, at_high, rest)
        guess = tau + rest / free
        inner = ((low + high) / 2 + _secant(low, high, at_low, at_high)) / 2
        tau = torch.where((guess > low) & (guess < high), guess, inner)
    return _clip(whole[0], thresholds, whole[1]), rows


def _secant(low: Tensor, high: Tensor, at_low: Tensor, at_high: Tensor) -> Tensor:
    return low + (high - low) * (at_low / (at_low - at_high))


def _clip(scores: Float[Tensor, "N K"], tau: Float[Tensor, "N 1"], upper: Float[Tensor, "N K"]) -> Tensor:
    large = tau.to(scores.dtype)
    above = scores - large
    if tau.dtype != scores.dtype:
        above.sub_((tau - large).to(scores.dtype))
    return torch.clamp(above, above.new_zeros(()), upper, out=above)


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
    return free.clone()


CSPARSEMAX = Bounded(newton, exact, slope=slope)


@transforms.register
class CsparsemaxSpec(BoundedSpec):
    """Sparsemax with a bound on each weight: what a source word may still receive."""

    kind: Literal["csparsemax"] = "csparsemax"
    paper: ClassVar[str] = "Malaviya et al. 2018"

    def build(self, dims: Dims) -> ScoreTransform:
        return partial(csparsemax, on_infeasible=self.on_infeasible)
