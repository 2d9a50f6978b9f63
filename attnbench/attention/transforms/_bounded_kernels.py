"""Triton kernels of _bounded_gpu.py: csoftmax and csparsemax of whole rows, and their gradients.

Thresholds are sought in double precision: under tight bounds they lie far from every weight.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.transforms._row_kernels import TINY, own_rows

CSOFTMAX: tl.constexpr = tl.constexpr(0)

MOST: tl.constexpr = tl.constexpr(2.0)
FEASIBLE: tl.constexpr = tl.constexpr(1e-6)
"""These two as in _bounded.py."""
CLOSE: tl.constexpr = tl.constexpr(2e-6)
"""How far from 1 weights may sum before the last step, which all but ends that."""
EXACT: tl.constexpr = tl.constexpr(1e-12)
"""The same where every key is at its bound or at 0, and no step can follow."""
FARTHEST: tl.constexpr = tl.constexpr(-1e8)
"""Scores that lie farther below the largest are taken to lie there, where a threshold has digits yet."""
ROUNDS: tl.constexpr = tl.constexpr(200)
"""More than it takes to halve any bracket until its ends meet."""


@triton.jit
def _parts(d, t, upper, KIND: tl.constexpr):
    """Weights at a threshold, how far they sum from 1, and by how much that falls with the threshold."""
    above = d - t
    if KIND == CSOFTMAX:
        whole = tl.exp(tl.minimum(above, 1.0))  # above every bound
        free = tl.where(whole < upper, whole, 0.0)
    else:
        whole = tl.maximum(above, 0.0)
        free = tl.where((above > 0.0) & (above < upper), 1.0, 0.0)
    part = tl.minimum(whole, upper)
    return part, tl.sum(part, 1) - 1.0, tl.sum(free, 1)


@triton.jit
def _moved(t, rest, free, KIND: tl.constexpr):
    """Newton's step: of csoftmax in the factor e^-t, in which the sum is concave."""
    ratio = rest / tl.where(free > 0.0, free, 1.0)
    step = ratio
    if KIND == CSOFTMAX:
        step = -tl.log(tl.maximum(1.0 - ratio, 1e-300))
    return tl.where(free > 0.0, t + step, t)


@triton.jit
def solve(
    scores, upper, valid, weights, bounds, short, rows, keys,
    KIND: tl.constexpr, VALID: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights of some rows of [N, K], NaN where a bound is none; the bounds that hold, 0 at keys that get no weight;
    and whether these sum to less than 1."""
    row, here, there, at = own_rows(rows, keys, ROWS, BLOCK)
    s = tl.load(scores + at, mask=there, other=float("-inf"))
    u = tl.load(upper + at, mask=there, other=0.0)
    alive = there & (s != float("-inf"))
    if VALID:
        alive = alive & (tl.load(valid + at, mask=there, other=0) != 0)
    strange = alive & ((s != s) | (s == float("inf")) | (u != u) | (u < 0.0))
    spoilt = tl.max(strange.to(tl.int32), 1) > 0
    u = tl.minimum(u, MOST)
    u = tl.where(alive & (u > 2 * TINY), u, 0.0)
    bound = u.to(tl.float64)
    total = tl.sum(bound, 1)
    some = u > 0.0
    d = tl.where(some & ~strange, s, float("-inf")).to(tl.float64)
    most = tl.max(d, 1)
    d = d - tl.where(most == float("-inf"), 0.0, most)[:, None]
    d = tl.where(some & ~strange, tl.maximum(d, FARTHEST), d)
    decided = (total <= 1.0 + FEASIBLE) | spoilt
    # weights sum to 1 and more at `low`, to 1 and less at `high`
    if KIND == CSOFTMAX:
        low = tl.min(tl.where(some, d - tl.log(tl.where(some, bound, 1.0)), float("inf")), 1)
        high = tl.log(tl.maximum(tl.sum(tl.exp(d), 1), 1.0))
        t = high
    else:
        low = tl.min(tl.where(some & ~strange, d, float("inf")), 1) - MOST
        high = tl.zeros([ROWS], tl.float64)
        t = tl.maximum(low * 0.5, -0.5)
    low = tl.where(decided, 0.0, low)
    high = tl.where(decided, 0.0, high)
    t = tl.where(decided, 0.0, t)
    rounds = 0
    going = 1
    while going > 0:
        part, rest, free = _parts(d, t[:, None], bound, KIND)
        moving = (tl.abs(rest) > tl.where(free > 0.0, CLOSE, EXACT)) & (high > low) & ~decided
        low = tl.where(moving & (rest > 0.0), t, low)
        high = tl.where(moving & (rest < 0.0), t, high)
        guess = _moved(t, rest, free, KIND)
        inside = (guess > low) & (guess < high) & (free > 0.0)
        middle = low + (high - low) * 0.5
        following = tl.where(inside, guess, middle)
        moving = moving & (following != t)
        t = tl.where(moving, following, t)
        rounds += 1
        going = tl.max(moving.to(tl.int32), 0)
        going = tl.where(rounds >= ROUNDS, 0, going)
    part, rest, free = _parts(d, t[:, None], bound, KIND)
    part, _, _ = _parts(d, _moved(t, rest, free, KIND)[:, None], bound, KIND)
    found = tl.where(decided[:, None], u, part.to(tl.float32))
    found = tl.where(alive & spoilt[:, None], float("nan"), found)
    tl.store(weights + at, found, mask=there)
    tl.store(bounds + at, u, mask=there)
    any_alive = tl.max(alive.to(tl.int32), 1) > 0
    tl.store(short + row, ((total < 1.0 - FEASIBLE) & any_alive).to(tl.uint8), mask=here)


@triton.jit
def vjp(
    weights, bounds, short, grad, to_scores, to_upper, rows, keys,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients at scores and bounds, as _bounded.py says; one that is no number is seen where there is weight."""
    row, here, there, at = own_rows(rows, keys, ROWS, BLOCK)
    p = tl.load(weights + at, mask=there, other=0.0)
    u = tl.load(bounds + at, mask=there, other=0.0)
    g = tl.load(grad + at, mask=there & (p != 0.0), other=0.0)
    full = tl.load(short + row, mask=here, other=0) != 0
    free = (p > 0.0) & (p < u)
    q = tl.where(free, p if KIND == CSOFTMAX else 1.0, 0.0)
    mass = tl.sum(q, 1)
    mean = tl.sum(tl.where(free, q * g, 0.0), 1) / tl.maximum(mass, TINY)
    nothing = p != p
    still = tl.where((p > 0.0) & ~free, g * 0.0, 0.0)
    dz = tl.where(free, q * (g - mean[:, None]), still)
    tl.store(to_scores + at, tl.where(nothing, p, dz), mask=there)
    moves = (mass > 0.0) | full
    du = tl.where((p > 0.0) & ~free & moves[:, None], g - mean[:, None], still)
    tl.store(to_upper + at, tl.where(nothing, p, du), mask=there)
