"""The forward Triton kernel of fused.py: sparse attention that never writes the scores.

A program takes one block of queries of one head. The scores of a block of keys are computed anew wherever they are
needed: to find the threshold of each row, and to mix the values.
With e = alpha - 1 and d the scores minus their largest, alpha-entmax is `p = [1 + e (d - t)]_+^(1/e)` (_entmax.py); t
is found from below by Newton's method on `(sum p)^e = 1`, as in torch operations. It begins where the largest scores of
classes of keys, places equal modulo BLOCK_N, would have it: fewer keys, so no higher.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import (
    PRECISION,
    ROUNDS,
    alive_in,
    drawn_for,
    halfway,
    kept_in,
    rows_from,
    scores_of,
    sums_of,
)
from attnbench.attention.transforms._climb import SETTLED, TOPK, mass_of, step_of

STEPS: tl.constexpr = tl.constexpr(4)
"""Of Newton's method on the largest scores of classes."""


@triton.jit
def forward(
    query, key, value, out, slope, threshold, most, total, valid, excess, found, crowded,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, count, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROOM: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Contexts of one block of queries. For backward: slope, the mean of the values under the part that the gradient
    goes through; threshold, most and total of each row. SHORT: all keys are one block, whose scores are computed once.

    ROOM: unless 0, only rows that have more listed keys (_listed.py). Newton's method goes on from their most and
    threshold; top-k begins anew, since a bound that is a score might be missed by that score, rounded otherwise.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    place = bh * queries + row
    rows = row < queries
    if ROOM > 0:
        if tl.load(crowded + bh) == 0:
            return
        rows = rows & (tl.load(found + place, mask=rows, other=0) > ROOM)
        if tl.max(rows.to(tl.int32), 0) == 0:
            return
    q = rows_from(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
    keys_of, values_of, valid_of = key + b * kb + h * kh, value + b * vb + h * vh, valid + b * valid_b
    e = tl.load(excess + h)
    drawn = drawn_for(seed, bh, DROPOUT)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)

    if SHORT:
        all_alive = alive_in(valid_of, queries, 0, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        all_scores = scores_of(q, rows_from(keys_of, keys, kn, 0, width, BLOCK_N, WIDTH), all_alive, scale)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    low = tl.full([BLOCK_M], float("inf"), tl.float32)
    living = tl.zeros([BLOCK_M], tl.float32)
    t = tl.zeros([BLOCK_M], tl.float32)
    if ROOM > 0 and KIND != TOPK:
        centre = tl.load(most + place, mask=rows, other=0.0)
        t = tl.load(threshold + place, mask=rows, other=0.0)
    elif KIND != TOPK:
        best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
        for n in range(0, end, BLOCK_N):
            if SHORT:
                s = all_scores
            else:
                alive = alive_in(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
                s = scores_of(q, rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
            best = tl.maximum(best, s, propagate_nan=tl.PropagateNan.ALL)
        m = tl.max(best, 1)
        centre = tl.where(m == float("-inf"), 0.0, m)  # a row without a key
        if not SHORT:
            best = best - centre[:, None]
            for _ in range(STEPS):
                mass_sum, part_sum = sums_of(best, t, e, KIND)
                t += step_of(mass_sum, part_sum, e, KIND)
    else:
        for n in range(0, end, BLOCK_N):
            if SHORT:
                alive, s = all_alive, all_scores
            else:
                alive = alive_in(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
                s = scores_of(q, rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
            m = tl.maximum(m, tl.max(s, 1), propagate_nan=tl.PropagateNan.ALL)
            low = tl.minimum(low, tl.min(tl.where(alive, s, float("inf")), 1))
            living += tl.sum(alive.to(tl.float32), 1)
        centre = tl.where(m == float("-inf"), 0.0, m)
        t = tl.where(low == float("inf"), centre, low)
    rounds = 0
    going = 1
    if KIND == TOPK:
        # The least of a row's `count` best lies in [t, high); at least `count` keys score t or more.
        high = centre + tl.maximum(tl.abs(centre), 1.0) * 1e-6
        above = tl.where(rows, living, 0.0)
        going = tl.max((above > count).to(tl.int32), 0)
        for _ in range(ROUNDS):  # a `while` here is more than Triton 3.6 can lay out
            if going > 0:
                step = (high - t) * 0.25
                one, two, three = t + step, t + 2 * step, t + 3 * step
                first_count = tl.zeros([BLOCK_M], tl.float32)
                second_count = tl.zeros([BLOCK_M], tl.float32)
                third_count = tl.zeros([BLOCK_M], tl.float32)
                for n in range(0, end, BLOCK_N):
                    if SHORT:
                        alive, s = all_alive, all_scores
                    else:
                        alive = alive_in(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
                        s = scores_of(q, rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
                    first_count += tl.sum((alive & (s >= one[:, None])).to(tl.float32), 1)
                    second_count += tl.sum((alive & (s >= two[:, None])).to(tl.float32), 1)
                    third_count += tl.sum((alive & (s >= three[:, None])).to(tl.float32), 1)
                between = (two > t) & (two < high) & (above > count)
                high = tl.where(first_count < count, one, tl.where(second_count < count, two,
                                tl.where(third_count < count, three, high)))  # fmt: skip
                above = tl.where(third_count >= count, third_count, tl.where(second_count >= count, second_count,
                                 tl.where(first_count >= count, first_count, above)))  # fmt: skip
                t = tl.where(third_count >= count, three, tl.where(second_count >= count, two,
                             tl.where(first_count >= count, one, t)))  # fmt: skip
                going = tl.max((between & (above > count)).to(tl.int32), 0)
    else:
        while going > 0:
            mass_sum = tl.zeros([BLOCK_M], tl.float32)
            part_sum = tl.zeros([BLOCK_M], tl.float32)
            for n in range(0, end, BLOCK_N):
                if SHORT:
                    alive, s = all_alive, all_scores
                else:
                    alive = alive_in(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
                    s = scores_of(q, rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
                mass, part = mass_of(s - centre[:, None], t[:, None], e, KIND)
                mass_sum += tl.sum(mass, 1)
                part_sum += tl.sum(part, 1)
            step = step_of(mass_sum, part_sum, e, KIND)
            t += step
            rounds += 1
            going = tl.max((step > SETTLED * (1.0 + t)).to(tl.int32), 0)
            going = tl.where(rounds >= ROUNDS, 0, going)

    context = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    through = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    mass_sum = tl.zeros([BLOCK_M], tl.float32)
    part_sum = tl.zeros([BLOCK_M], tl.float32)
    least = tl.full([BLOCK_M], float("inf"), tl.float32)
    left = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for n in range(0, end, BLOCK_N):
        if SHORT:
            alive, s = all_alive, all_scores
        else:
            alive = alive_in(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            s = scores_of(q, rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
        d = s - centre[:, None]
        if KIND == TOPK:
            chosen = s >= t[:, None]
            least = tl.minimum(least, tl.min(tl.where(chosen & alive, s, float("inf")), 1))
            left = tl.maximum(left, tl.max(tl.where(chosen, float("-inf"), s), 1))
            mass = tl.where(chosen | (d != d), tl.exp(d), 0.0)
            part = mass
        else:
            mass, part = mass_of(d, t[:, None], e, KIND)
        mass = tl.where(alive, mass, 0.0)
        part = tl.where(alive, part, 0.0)
        mass_sum += tl.sum(mass, 1)
        if DROPOUT:
            kept = kept_in(drawn, first, n, keys, rate, BLOCK_M, BLOCK_N)
            mass = mass * kept
        v = rows_from(values_of, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH)
        context += tl.dot(mass.to(v.dtype), v, input_precision=PRECISION)
        if GRADIENT and KIND != TOPK:
            part_sum += tl.sum(part, 1)
            if DROPOUT:
                part = part * kept
            through += tl.dot(part.to(v.dtype), v, input_precision=PRECISION)
    shared = tl.where(mass_sum == 0.0, 1.0, mass_sum)
    context = context / shared[:, None]

    column = tl.arange(0, VALUE_WIDTH)
    there = rows[:, None] & (column < value_width)[None, :]
    at = row[:, None] * om + column[None, :]
    tl.store(out + b * ob + h * oh + at, context.to(out.dtype.element_ty), mask=there)
    if GRADIENT:
        if KIND == TOPK:
            t = halfway(left, least)
        else:
            held = tl.where(part_sum == 0.0, 1.0, part_sum)
            at = row[:, None] * value_width + column[None, :]
            tl.store(slope + bh * queries * value_width + at, through / held[:, None], mask=there)
        tl.store(threshold + place, t, mask=rows)
        tl.store(most + place, centre, mask=rows)
        tl.store(total + place, shared, mask=rows)
