"""Triton kernels of _rows_gpu.py: the weights of rows of scores, and the gradient at the scores.

A program holds some whole rows; what it searches for in them it searches without reading them again.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.climb import ENTMAX15, SPARSEMAX, TOPK, goes_on, mass_of, step_of

ROUNDS: tl.constexpr = tl.constexpr(200)
"""Searches end long before; what has no root (NaN) ends here."""
TINY: tl.constexpr = tl.constexpr(1.1754944e-38)
"""The least normal number in float32."""
HALF: tl.constexpr = tl.constexpr(0.5)
"""Below it `(e^x - 1 - x) / x^2` is computed from its series."""


@triton.jit
def own_rows(rows, keys, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of a program, which of them and of their keys there are, and where these lie in memory."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    here = row < rows
    there = here[:, None] & (column < keys)[None, :]
    return row, here, there, row[:, None] * keys + column[None, :]


@triton.jit
def _place(row, middle, inner, outer_stride, middle_stride, inner_stride):
    """Where a row of [O, M, I, K] begins in a tensor with these strides."""
    return (
        row // (middle * inner) * outer_stride
        + row // inner % middle * middle_stride
        + row % inner * inner_stride
    )  # fmt: skip


@triton.jit
def _ordered(s):
    """Whole numbers in the order of the scores, none of which is NaN; one for both zeros."""
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _chosen(s, alive, count):
    """The `count` best keys of each row, with all that equal the last of them."""
    order = _ordered(s)
    reached = tl.sum((alive & (order >= 0)).to(tl.int32), 1)
    t = tl.where(reached >= count, 0, -2147483648)  # the most that `count` keys reach, found bit by bit
    one = 1 << 30
    for _ in range(31):
        higher = t | one
        reached = tl.sum((alive & (order >= higher[:, None])).to(tl.int32), 1)
        t = tl.where(reached >= count, higher, t)
        one = one >> 1
    return order >= t[:, None]


@triton.jit
def weigh(
    scores, valid, keep, excess, out,
    vo, vm, vi, vk, ko, km, ki, kk, eo, em, ei, rows, middle, inner, keys, count,
    KIND: tl.constexpr, VALID: tl.constexpr, KEEP: tl.constexpr, ALL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights of some rows of [O, M, I, K]. ALL: of the kind top-k, every key is kept."""
    row, here, there, at = own_rows(rows, keys, ROWS, BLOCK)
    column = tl.arange(0, BLOCK)
    s = tl.load(scores + at, mask=there, other=float("-inf"))
    alive = there & (s != float("-inf"))
    if VALID:
        start = _place(row, middle, inner, vo, vm, vi)
        alive = alive & (tl.load(valid + start[:, None] + column[None, :] * vk, mask=there, other=0) != 0)
    strange = alive & ((s != s) | (s == float("inf")))
    spoilt = tl.max(strange.to(tl.int32), 1) > 0
    s = tl.where(alive & ~strange, s, float("-inf"))
    most = tl.max(s, 1)
    d = s - tl.where(most == float("-inf"), 0.0, most)[:, None]
    if KIND == TOPK:
        mass = tl.exp(d)
        if not ALL:
            wanted = alive
            if KEEP:
                start = _place(row, middle, inner, ko, km, ki)
                kept = tl.load(keep + start[:, None] + column[None, :] * kk, mask=there, other=0) != 0
                wanted = alive & ~kept
            best = wanted & _chosen(s, wanted, count)
            if KEEP:
                best = best | (alive & kept)
            mass = tl.where(best, mass, 0.0)
    else:
        e = tl.load(excess + _place(row, middle, inner, eo, em, ei), mask=here, other=1.0)
        least, e = tl.min(e, 0), e[:, None]
        t = tl.zeros([ROWS], tl.float32)
        rounds = 0
        going = 1
        while going > 0:
            mass, part = mass_of(d, t[:, None], e, KIND, least)
            held = tl.sum(part, 1)
            step = step_of(tl.sum(mass, 1), held, tl.sum(e, 1), KIND)
            t += step
            rounds += 1
            going = tl.max(goes_on(step, held, t, KIND).to(tl.int32), 0)
            going = tl.where(rounds >= ROUNDS, 0, going)
        mass, _ = mass_of(d, t[:, None], e, KIND, least)
    mass = tl.where(alive, mass, 0.0)
    weights = mass / tl.maximum(tl.sum(mass, 1), TINY)[:, None]
    weights = tl.where(alive & spoilt[:, None], float("nan"), weights)
    tl.store(out + at, weights, mask=there)


@triton.jit
def vjp(
    weights, grad, excess, out, alphas, eo, em, ei, rows, middle, inner, keys,
    KIND: tl.constexpr, LEARNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient at the scores of some rows: `q (g - <q, g> / sum q)`, q as in _simplex.py. LEARNED: also that at
    alpha, as in `_entmax.alpha_gradient`."""
    row, here, there, at = own_rows(rows, keys, ROWS, BLOCK)
    p = tl.load(weights + at, mask=there, other=0.0)
    held = p != 0.0  # NaN too
    g = tl.load(grad + at, mask=held & there, other=0.0)
    if KIND == TOPK:
        q = p
    elif KIND == SPARSEMAX:
        q = tl.where(held, p - p + 1.0, 0.0)
    elif KIND == ENTMAX15:
        q = tl.sqrt(p)
    else:
        e = tl.load(excess + _place(row, middle, inner, eo, em, ei), mask=here, other=1.0)[:, None]
        log = tl.log(tl.maximum(p, TINY, propagate_nan=tl.PropagateNan.ALL))
        q = tl.where(held, tl.exp(log * (1.0 - e)), 0.0)
    mean = tl.sum(q * g, 1) / tl.maximum(tl.sum(q, 1), TINY)
    tl.store(out + at, tl.where(held, q * (g - mean[:, None]), 0.0), mask=there)
    if LEARNED:
        x = -e * log
        series = 1.0 + x / 10
        for place in range(7):
            series = 1.0 + series * x / (9 - place)
        wide = tl.maximum(x, HALF, propagate_nan=tl.PropagateNan.ALL)
        bend = log * log * tl.where(x < HALF, series / 2, (tl.exp(wide) - 1.0 - wide) / (wide * wide))
        bend = tl.where(held, bend, 0.0)
        log = tl.where(held, log, 0.0)
        taken = p * g
        mean_bend, mean_log = tl.sum(p * bend, 1), tl.sum(p * log, 1)
        taken_bend, taken_log = tl.sum(taken * bend, 1), tl.sum(taken * log, 1)
        e_row = tl.sum(e, 1)
        moved = mean_bend * tl.sum(taken, 1) - taken_bend + e_row * (mean_log * taken_bend - mean_bend * taken_log)
        # sum q is 1 + sum p (e^x - 1)
        tl.store(alphas + row, moved / tl.maximum(tl.sum(q, 1), TINY), mask=here)
