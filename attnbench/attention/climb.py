"""What Triton kernels share that find the threshold of alpha-entmax: its weights, and a step of the search.

With e = alpha - 1 and d the scores minus their largest, `p = [1 + e (d - t)]_+^(1/e)` (_entmax.py); t is found from
below by Newton's method on `(sum p)^e = 1`, as in torch operations.
"""

# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from attnbench.core.kernels import interpreted

TOPK: tl.constexpr = tl.constexpr(0)
SPARSEMAX: tl.constexpr = tl.constexpr(1)
ENTMAX15: tl.constexpr = tl.constexpr(2)

SMALL: tl.constexpr = tl.constexpr(0.05)
"""Below it functions of one plus a little are computed from their series."""
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
PLAIN: tl.constexpr = tl.constexpr(interpreted() or torch.version.hip is not None)
"""Without instructions of NVIDIA's."""
STEEP: tl.constexpr = tl.constexpr(0.1)
"""From this alpha - 1 on, logarithms have digits enough without a series."""
SETTLED: tl.constexpr = tl.constexpr(2e-6)
"""Masses that sum to so little more than 1 end the search."""
DIGIT: tl.constexpr = tl.constexpr(1.2e-7)
"""A step by less, as a part of the threshold, moves it no further."""


@triton.jit
def base_of(d, t, e):
    """r = [1 + e (d - t)]_+; NaN stays NaN."""
    return tl.maximum(e * d + (1.0 - e * t), 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log_over_e(x, e, least=None):
    """log(1 + x) / e, of x > -1: with all its digits where e is small. least: as in `mass_of`."""
    log = _log2(tl.maximum(1.0 + x, 1e-37, propagate_nan=tl.PropagateNan.ALL)) * LN2
    if (e if least is None else least) < STEEP:
        series = x * (1.0 - x * (1 / 2 - x * (1 / 3 - x * (1 / 4 - x * (1 / 5 - x / 6)))))
        log = tl.where(tl.abs(x) < SMALL, series, log)
    return log * (1.0 / e)


@triton.jit
def _log2(r):
    """To 2^-22: the GPU's own, in place of a function of twenty instructions. Near r = 1 that is asked from STEEP on
    alone, where it is 2e-6 of a weight at most."""
    if PLAIN:
        return tl.log2(r)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [r], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def mass_of(d, t, e, KIND: tl.constexpr, least=None):
    """p = r^(1/e), and its part r^(1/e - 1) that the gradient goes through. least: of several e the least."""
    if KIND == SPARSEMAX or KIND == ENTMAX15:  # noqa: SIM109 - which Triton cannot read
        return mass_at(base_of(d, t, e), e, KIND)
    return mass_at(e * (d - t), e, KIND, least)


@triton.jit
def mass_at(x, e, KIND: tl.constexpr, least=None):
    """The same, from r or less; of a general alpha from r - 1, which keeps its digits."""
    if KIND == SPARSEMAX:
        mass = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        part = tl.where(mass > 0.0, 1.0, mass)
    elif KIND == ENTMAX15:
        part = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        mass = part * part
    else:
        r = tl.maximum(1.0 + x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if (e if least is None else least) < STEEP:
            part = tl.where(r <= 0.0, 0.0, tl.exp2(log_over_e(x, e, least) * ((1.0 - e) * LOG2E)))
        else:
            part = tl.exp2(_log2(r) * tl.maximum((1.0 - e) / e, 1e-30))  # 0 of 0 for e = 1, too
        mass = part * r
    return mass, part


@triton.jit
def step_of(mass_sum, part_sum, e, KIND: tl.constexpr):
    """Of Newton's method, from below."""
    if KIND == SPARSEMAX:
        step = (mass_sum - 1.0) / part_sum
    elif KIND == ENTMAX15:
        step = 2.0 * (mass_sum - tl.sqrt(mass_sum)) / part_sum
    else:
        y = e * tl.log(mass_sum)
        series = y * (1.0 - y * (1 / 2 - y * (1 / 6 - y * (1 / 24 - y / 120))))
        step = mass_sum * tl.where(tl.abs(y) < SMALL, series, 1.0 - tl.exp(-y)) / (e * part_sum)
    return tl.where(step > 0.0, step, 0.0)  # NaN too: a row without a key, or one that is not all numbers


@triton.jit
def goes_on(step, part_sum, t, KIND: tl.constexpr):
    """Whether a row is searched further after that step, which came to t."""
    if KIND == ENTMAX15:  # what is left is the square of the step, key for key
        return step > SETTLED * (1.0 + t)
    return (step * part_sum > SETTLED) & (step > DIGIT * t)
