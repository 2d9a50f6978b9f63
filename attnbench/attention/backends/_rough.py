"""The forward Triton kernels of fused.py for entmax-1.5 in half precision, where a threshold need not be known to its
last digit before values are mixed.

`thresholds` goes over the keys once, for the four largest scores of each class (_classes.py) in float16, of which a GPU
compares two at a time and holds twice as many. `contexts` mixes the values, and moves each threshold by the step d that
the sum of its row's weights tells: with r = 1 + (score - threshold) / 2, weights r^2 become (r - d)^2 = r^2 - 2 d r,
but for d^2, which rounding hides. Where it does not, for a key beside the four of a class or for coarse scores, a
second call mixes the values of that row again.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import ROUNDS, rows_from, scores_at, seen_by_all, store_rows
from attnbench.attention.backends._classes import TURNS, start_of, taken, taken_pair
from attnbench.attention.backends._dropout import drawn_for
from attnbench.attention.backends._passes import best_of, mixed_of
from attnbench.attention.climb import ENTMAX15

STEPS: tl.constexpr = tl.constexpr(2)
"""Of Newton's method on the largest scores of classes alone, before the others join."""
ROUGH: tl.constexpr = tl.constexpr(5e-3)
"""A step of Newton's method (of r) by less ends the search among the largest scores: some 1e-5 are left to go then."""
SMALL: tl.constexpr = tl.constexpr(0.1)
"""One by less, in parts of the mean r of all keys that have a weight, ends the search among all: the next is half of
its square at most."""
CLOSE: tl.constexpr = tl.constexpr(5e-3)
"""One by less, in the same parts, is made good after values are mixed: by so much their mean under r is off."""
NEAR: tl.constexpr = tl.constexpr(1e-3)
"""But not one back by more, on which keys come in that it did not know of."""
CROWDED: tl.constexpr = tl.constexpr(3.5)
"""From so many classes on of which all four have a weight, others of them have, too: all keys are searched, which
costs less than to mix values again."""
FAR: tl.constexpr = tl.constexpr(32.0)
"""From this difference of two scores on, float16 rounds by so much that a row might be left without a weight."""


@triton.jit
def thresholds(
    query, key, threshold, most, number, valid, excess, qb, qh, qm, kb, kh, kn, valid_b,
    heads, queries, keys, width, ahead, scale,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The threshold of each row of one block of queries, to some 1e-3; its largest score, rounded; and how many keys
    have a weight, at most but for rounding. FULL: as in `forward`."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    place, rows = bh * queries + row, row < queries
    q = rows_from(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
    keys_of, valid_of = key + b * kb + h * kh, valid + b * valid_b
    e = tl.load(excess + h)
    end, whole = keys, seen_by_all(first, keys, ahead, CAUSAL, BLOCK_N)
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)

    one, two, three, four, base = _largest_of(
        q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end,
        CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, FULL,
    )  # fmt: skip
    top = tl.cast(tl.max(one, 1), tl.float32)
    t, known, crowded = _root_of(one, two, three, four, top, tl.cdiv(keys, BLOCK_N), BLOCK_M)
    centre = base + top
    far = (tl.abs(top) < FAR) == 0  # NaN too, and rows without a key
    going = tl.max((rows & (far | crowded)).to(tl.int32), 0)
    if tl.max((rows & far).to(tl.int32), 0) > 0:
        best = best_of(
            q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end,
            CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        top = tl.max(best, 1)
        centre = tl.where(top == float("-inf"), 0.0, top)
        t = start_of(best - centre[:, None], e, ENTMAX15, BLOCK_M)
    turns = 0
    while going > 0:
        mass_sum, part_sum, known = _sums_of(
            q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, centre, t,
            CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, FULL,
        )  # fmt: skip
        step = _step_of(mass_sum, part_sum)
        t += 2.0 * step
        going = tl.max((rows & _is_large(step, part_sum, known, SMALL)).to(tl.int32), 0)
        turns += 1
        going = tl.where(turns >= ROUNDS, 0, going)
    tl.store(threshold + place, t, mask=rows)
    tl.store(most + place, centre, mask=rows)
    tl.store(number + place, known, mask=rows)


@triton.jit
def _is_large(step, part_sum, number, least):
    """Whether a step of Newton's method is no last one. number: of keys that have a weight, of which r sums to
    `part_sum`."""
    return (step < -NEAR) | (tl.abs(step) * number > least * part_sum)


@triton.jit
def _largest_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, whole, end,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The four largest scores of each class of keys, less `base`, the largest of each row's first block of keys, so
    that their rounding is one of differences."""
    k = rows_from(keys_of, keys, kn, 0, width, BLOCK_N, WIDTH)
    s = scores_at(q, k, valid, queries, 0, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
    base = tl.max(s, 1)
    base = tl.where(base == float("-inf"), 0.0, base)
    one = (s - base[:, None]).to(tl.float16)
    two = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float16)
    three, four = two, two
    paired = BLOCK_N + tl.maximum(whole - BLOCK_N, 0) // (2 * BLOCK_N) * (2 * BLOCK_N)
    for n in range(BLOCK_N, paired, 2 * BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH, FULL)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, False, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        half = (s - base[:, None]).to(tl.float16)
        at = n + BLOCK_N
        k = rows_from(keys_of, keys, kn, at, width, BLOCK_N, WIDTH, FULL)
        s = scores_at(q, k, valid, queries, at, first, keys, ahead, scale, False, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        other = (s - base[:, None]).to(tl.float16)
        one, two, three, four = taken_pair(half, other, one, two, three, four)
    for n in range(paired, whole, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH, FULL)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, False, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        half = (s - base[:, None]).to(tl.float16)
        one, two, three, four = taken(half, one, two, three, four)
    for n in range(tl.maximum(whole, BLOCK_N), end, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        half = (s - base[:, None]).to(tl.float16)
        one, two, three, four = taken(half, one, two, three, four)
    return one, two, three, four, base


@triton.jit
def _root_of(first, second, third, fourth, top, deep, BLOCK_M: tl.constexpr):
    """The threshold of each row, from its largest score `top`; how many keys have a weight at most, of `deep` keys a
    class; and whether many beside these will."""
    most = top.to(tl.float16)
    # halves of differences in float16, as they stay: float32 would take twice the registers
    first, second = (first - most[:, None]) * 0.5, (second - most[:, None]) * 0.5
    third, fourth = (third - most[:, None]) * 0.5, (fourth - most[:, None]) * 0.5
    below = tl.full([BLOCK_M], 1.0, tl.float16)  # r of the largest
    nothing = tl.full([1, 1], 0.0, tl.float16)
    for _ in range(STEPS):
        part = tl.maximum(first + below[:, None], nothing)
        below = _lowered(below, part * part, part)
    going = 1
    turns = 0
    while going > 0:
        one = tl.maximum(first + below[:, None], nothing)
        two = tl.maximum(second + below[:, None], nothing)
        three = tl.maximum(third + below[:, None], nothing)
        four = tl.maximum(fourth + below[:, None], nothing)
        mass = one * one + two * two + three * three + four * four
        lower = _lowered(below, mass, one + two + three + four)
        going = tl.max((below.to(tl.float32) - lower.to(tl.float32) > ROUGH).to(tl.int32), 0)
        below = lower
        turns += 1
        going = tl.where(turns >= TURNS, 0, going)
    last = _there(fourth, below)
    known = _there(first, below) + _there(second, below) + _there(third, below) + last
    full = tl.sum(last.to(tl.float32), 1)
    known = tl.sum(known.to(tl.float32), 1) + tl.maximum(deep - 4, 0) * full
    return 2.0 - 2.0 * below.to(tl.float32), known, full > CROWDED


@triton.jit
def _there(difference, below):
    """1 for a key with a weight, and for one from which rounding may have taken it; else 0."""
    nothing, one = tl.full([1, 1], 0.0, tl.float16), tl.full([1, 1], 1.0, tl.float16)
    steep = tl.full([1, 1], 1024.0, tl.float16)  # some r are counted in part
    return tl.minimum(tl.maximum(difference * steep + (below[:, None] * steep + one), nothing), one)


@triton.jit
def _lowered(below, mass, part):
    """The r of a row's largest score, a step on."""
    mass_sum, part_sum = tl.sum(mass.to(tl.float32), 1), tl.sum(part.to(tl.float32), 1)
    return (below.to(tl.float32) - _step_of(mass_sum, part_sum)).to(tl.float16)


@triton.jit
def _step_of(mass_sum, part_sum):
    """By how much r falls in a step of Newton's method on `(sum r^2)^(1/2) = 1`; 0 for a row without a key, and for one
    that is not all numbers."""
    step = (mass_sum - tl.sqrt(mass_sum)) / part_sum
    return tl.where(step == step, step, 0.0)


@triton.jit
def _sums_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, whole, end, centre, t,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Of each row at threshold `t`, the sums of r^2 and of r, and how many keys have a weight."""
    mass_sum = tl.zeros([BLOCK_M], tl.float32)
    part_sum = tl.zeros([BLOCK_M], tl.float32)
    number = tl.zeros([BLOCK_M], tl.float32)
    centre, below = centre[:, None], (1.0 - 0.5 * t)[:, None]  # large scores keep their digits
    for n in range(0, whole, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH, FULL)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, False, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        mass, part, some = _sums_in(s, centre, below)
        mass_sum += mass
        part_sum += part
        number += some
    for n in range(whole, end, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        mass, part, some = _sums_in(s, centre, below)
        mass_sum += mass
        part_sum += part
        number += some
    return mass_sum, part_sum, number


@triton.jit
def _sums_in(s, centre, below):
    """What a block of keys adds to these."""
    part = tl.maximum(0.5 * (s - centre) + below, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(part * part, 1), tl.sum(part, 1), tl.sum((part > 0.0).to(tl.float32), 1)


@triton.jit
def contexts(
    query, key, value, out, slope, threshold, most, inverse, number, again, valid, excess,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, seed, rate,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr, AGAIN: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What `forward` makes of one block of queries, from what `thresholds` left. again: of each row, whether a step was
    no last one. AGAIN: blocks with such a row only, until one is; with GRADIENT from where the first call came to."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    place, rows = bh * queries + row, row < queries
    if AGAIN:  # noqa: SIM102 - decided when compiled, so not one condition
        if tl.max(tl.load(again + place, mask=rows, other=0), 0) == 0:
            return
    q = rows_from(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
    keys_of, values_of, valid_of = key + b * kb + h * kh, value + b * vb + h * vh, valid + b * valid_b
    e = tl.load(excess + h)
    end, whole = keys, seen_by_all(first, keys, ahead, CAUSAL, BLOCK_N)
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)
    t = tl.load(threshold + place, mask=rows, other=0.0)
    centre = tl.load(most + place, mask=rows, other=0.0)
    drawn = drawn_for(seed, bh, DROPOUT)
    context, through, mass_sum, part_sum = mixed_of(
        q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, values_of, vn, value_width,
        centre, t, e, drawn, rate,
        ENTMAX15, CAUSAL, VALID, DROPOUT, True, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, FULL,
    )  # fmt: skip
    step = _step_of(mass_sum, part_sum)
    known = tl.load(number + place, mask=rows, other=0.0)
    large = (rows & _is_large(step, part_sum, known, CLOSE)).to(tl.int32)
    if AGAIN:  # a loop that others would pay for, in registers
        going, turns = tl.max(large, 0), 0
        while going > 0:
            t += 2.0 * step
            context, through, mass_sum, part_sum = mixed_of(
                q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, values_of, vn,
                value_width, centre, t, e, drawn, rate,
                ENTMAX15, CAUSAL, VALID, DROPOUT, True, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, FULL,
            )  # fmt: skip
            step = _step_of(mass_sum, part_sum)
            turns += 1
            going = tl.max((rows & _is_large(step, part_sum, known, CLOSE)).to(tl.int32), 0)
            going = tl.where(turns >= ROUNDS, 0, going)
    else:
        tl.store(again + place, large, mask=rows)
    moved = 2.0 * step[:, None] * through
    context -= tl.where(tl.abs(through) < float("inf"), moved, 0.0)  # an infinite value stays infinite
    mass_sum -= 2.0 * step * part_sum
    t += 2.0 * step
    store_rows(
        out + b * ob + h * oh, om, slope + bh * queries * value_width, threshold, most, inverse, row, place, rows,
        context, through, mass_sum, part_sum, centre, t, value_width, ENTMAX15, GRADIENT, VALUE_WIDTH,
    )  # fmt: skip
