"""Constrained softmax: the distribution under the bounds that is nearest to softmax, `p_i = min(e^(z_i) / Z, u_i)`."""

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
"""Newton's rounds; a row that still moves then is solved by `exact`."""


def csoftmax(
    scores: Float[Tensor, "... K"],
    *,
    valid: Bool[Tensor, "..."] | None = None,
    keep: Bool[Tensor, "..."] | None = None,
    upper: Float[Tensor, "..."] | None = None,
    on_infeasible: OnInfeasible = "raise",
) -> Float[Tensor, "... K"]:
    """`argmin KL(p || softmax(z))` over each row's distributions with every weight at most its bound `upper`.

    Source: Martins & Kreutzer 2017. Raises ValueError for `keep`, and for bounds as `bounded` says.
    """
    refuse("csoftmax", keep=keep)
    return bounded("csoftmax", scores, valid, upper, CSOFTMAX, on_infeasible)


def newton(scores: Float[Tensor, "N K"], upper: Float[Tensor, "N K"]) -> tuple[Float[Tensor, "N K"], Int[Tensor, "R"]]:
    """Newton's method on `sum min(c e^z, u) = 1`; and the rows that it leaves undone.

    The sum is concave in c: from softmax's c, which is too small, the method climbs and never oversteps. Undone are the
    rows that still move after ROUNDS, and those whose free keys lie so far below the largest score that e^z is lost.
    """
    limits = torch.finfo(scores.dtype)
    powers = (scores - scores.amax(-1, keepdim=True)).exp_()
    scale = 1 / powers.sum(-1, keepdim=True)
    weights = torch.empty_like(scores)
    rows = torch.arange(len(scores), device=scores.device)
    for _ in range(ROUNDS):
        part = powers * scale
        torch.minimum(part, upper, out=part)
        weights.index_copy_(0, rows, part)
        rest = 1 - part.sum(-1, keepdim=True)
        going = (rest.abs() > 16 * limits.eps).squeeze(1).nonzero().squeeze(1)
        if len(going) < len(rows):
            left = (rows, powers, upper, part, rest, scale)
            rows, powers, upper, part, rest, scale = (each.index_select(0, going) for each in left)
        if not len(rows):
            break
        free = (upper - part).sign_().mul_(powers).sum(-1, keepdim=True)
        scale = scale + rest / free.clamp_min(limits.tiny / limits.eps)
    return weights, rows


def exact(scores: Float[Tensor, "N K"], upper: Float[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """The same by rounds (Martins & Kreutzer 2017, algorithm 1), whatever the scale.

    The free keys share by softmax what the keys at their bound leave; whichever has more than its bound is given that.
    """
    full = upper <= 0
    while True:
        left = (1 - upper.masked_fill(~full, 0.0).sum(-1, keepdim=True)).clamp_min_(0.0)
        shares = scores.masked_fill(full, -torch.inf).softmax(-1)  # of no key: NaN, which is above nothing
        part = torch.where(full, upper, left * shares)
        over = part > upper
        if not bool(over.any()):
            return part
        full |= over


def slope(weights: Float[Tensor, "... K"], free: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """q = p at free keys."""
    return weights * free


CSOFTMAX = Bounded("csoftmax", newton, exact, slope)


@transforms.register
class CsoftmaxSpec(BoundedSpec):
    """Softmax with a bound on each weight: what a source word may still receive."""

    kind: Literal["csoftmax"] = "csoftmax"
    paper: ClassVar[str] = "Martins & Kreutzer 2017"

    def build(self, dims: Dims) -> ScoreTransform:
        return partial(csoftmax, on_infeasible=self.on_infeasible)
