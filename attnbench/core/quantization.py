"""Products of matrices rounded to whole numbers of 8 bits: what they are, in torch operations.

Each row is divided by a step of its own, and rounded: `x ~ step * whole`, with `step = max |x| / 127` and whole numbers
from -127 to 127, 0 being 0 (symmetric, as in Wu et al. 2020, section 3.1). Rows of states are rounded as they come, so
that what a sentence gets does not depend on the batch, except where its last digit breaks a tie in rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

_LARGEST = 127
_LEAST = 1e-30
"""Rows of no number larger than this count as zeros: the inverse of their step may be no number."""
_DEEPEST = 1 << 16
"""Compiled code sums up products of at most 255 * 127 in 32 bits."""


class Quantized(NamedTuple):
    """Rows that are rounded. whole: whole numbers, in a floating type. step: what 1 of them is worth."""

    whole: Float[Tensor, "*B K"]
    step: Float[Tensor, "*B 1"]


def require_depth(inputs: int) -> None:
    """Raise ValueError for more products than are summed up, by whatever multiplies here."""
    if inputs > _DEEPEST:
        raise ValueError(f"whole numbers of 8 bits are summed up to a depth of {_DEEPEST}, not of {inputs}")


def quantize(rows: Float[Tensor, "*B K"]) -> Quantized:
    """Each row by a step of its own, halves to even. A row with NaN or an infinite number has the step NaN, and so all
    that comes of it is NaN. Raises IndexError where K is 0."""
    largest = rows.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, _LARGEST)  # with a number torch may multiply by its inverse, which rounds otherwise
    inverse = torch.where(largest < _LEAST, 0.0, most / largest)
    return Quantized((rows * inverse).round(), torch.where(largest.isfinite(), largest / most, torch.nan))


def multiply(
    states: Float[Tensor, "*B K"], weight: Quantized, bias: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "*B N"]:
    """`states @ weight^T + bias` in float32, the states quantised too; not differentiable. Whole numbers are summed up
    in float32 here: exactly up to K = 1,040, where 127 * 127 * K reaches 2^24. Raises RuntimeError where the shapes do
    not fit."""
    with torch.autocast(states.device.type, enabled=False):
        whole, step = quantize(states.float())
        found = linear(whole, weight.whole) * step * weight.step[:, 0]
    return found if bias is None else found + bias
