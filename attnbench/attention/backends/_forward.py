"""The forward Triton kernel of fused.py: sparse attention that never writes the scores.

A program takes one block of queries of one head. It goes over the keys in passes, in which scores are computed anew:
one for the largest scores of classes of keys (_classes.py), which have the threshold of most rows; others, of blocks
where they have not, until it is found; and one that mixes the values. Where all keys are one block, its scores are
computed once.
With e = alpha - 1 and d the scores minus their largest, alpha-entmax is `p = [1 + e (d - t)]_+^(1/e)` (_entmax.py); t
is found from below by Newton's method on `(sum p)^e = 1`, as in torch operations.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import (
    PRECISION,
    ROUNDS,
    alive_in,
    best_weights,
    drawn_for,
    halfway,
    kept_in,
    rows_from,
    scores_at,
    scores_of,
    seen_by_all,
)
from attnbench.attention.backends._classes import kth_of, root_of, start_of
from attnbench.attention.backends._passes import (
    above_of,
    best_of,
    counts_of,
    edges_of,
    extremes_of,
    largest_of,
    weight_of,
)
from attnbench.attention.transforms._climb import SETTLED, TOPK, mass_of, step_of

NEAR: tl.constexpr = tl.constexpr(4)
"""Scores by which top-k goes up from where the largest of classes would have it, before it searches between bounds."""


@triton.jit
def forward(
    query, key, value, out, slope, threshold, most, inverse, valid, excess, found, crowded,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, count, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLASSES: tl.constexpr,
    ROOM: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Contexts of one block of queries. For backward: slope, the mean of the values under the part that the gradient
    goes through; of each row threshold, most and inverse, by which its weights are multiplied.

    CLASSES: of keys, whose four largest scores are kept; 0: more keys have a weight than these can tell. SHORT: all
    keys are one block, whose scores are computed once. FULL: states are as wide as their tiles.
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
    end, whole = keys, seen_by_all(first, keys, ahead, CAUSAL, BLOCK_N)
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)

    all_scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SHORT:
        k = rows_from(keys_of, keys, kn, 0, width, BLOCK_N, WIDTH)
        all_scores = scores_of(
            q, k, alive_in(valid_of, queries, 0, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N), scale
        )

    searched = 1
    left = tl.full([BLOCK_M], float("-inf"), tl.float32)
    above = tl.zeros([BLOCK_M], tl.float32)
    if ROOM > 0 and KIND != TOPK:
        centre = tl.load(most + place, mask=rows, other=0.0)
        t = tl.load(threshold + place, mask=rows, other=0.0)
    elif SHORT or CLASSES == 0:
        if KIND == TOPK:
            m, t, above = extremes_of(
                q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end, all_scores,
                CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT,
            )  # fmt: skip
            centre = tl.where(m == float("-inf"), 0.0, m)  # a row without a key
            above = tl.where(rows, above, 0.0)
            t = tl.where(above > count, t, float("-inf"))
            searched = tl.max((above > count).to(tl.int32), 0)
        else:
            best = all_scores
            if not SHORT:
                best = best_of(
                    q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end,
                    CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            m = tl.max(best, 1)
            centre = tl.where(m == float("-inf"), 0.0, m)
            t = tl.zeros([BLOCK_M], tl.float32)
            if not SHORT:
                t = start_of(best - centre[:, None], e, KIND, BLOCK_M)
    else:
        one, two, three, four = largest_of(
            q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end,
            CAUSAL, VALID, WIDTH, BLOCK_M, CLASSES, FULL,
        )  # fmt: skip
        m = tl.max(one, 1)
        centre = tl.where(m == float("-inf"), 0.0, m)
        if KIND == TOPK:
            t, left, exact = kth_of(one, two, three, four, count, BLOCK_M)
        else:
            t, exact = root_of(one, two, three, four, centre, e, KIND, BLOCK_M)
        searched = tl.max((rows & (exact == 0)).to(tl.int32), 0)

    if KIND == TOPK:
        going = searched
        if CLASSES > 0 and not SHORT:
            for _ in range(NEAR):
                if going > 0:
                    over, next_up = above_of(
                        q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end, t,
                        CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                    low = rows & (over >= count)
                    t = tl.where(low, next_up, t)
                    above = tl.where(low, over, 0.0)
                    going = tl.max(low.to(tl.int32), 0)
        # The least of a row's `count` best lies in [t, high); at least `count` keys score t or more.
        high = centre + tl.maximum(tl.abs(centre), 1.0) * 1e-6
        for _ in range(ROUNDS):  # a `while` here is more than Triton 3.6 can lay out
            if going > 0:
                step = (high - t) * 0.25
                one_up, two_up, three_up = t + step, t + 2 * step, t + 3 * step
                first_count, second_count, third_count = counts_of(
                    q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end, all_scores,
                    one_up, two_up, three_up, CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT,
                )  # fmt: skip
                between = (two_up > t) & (two_up < high) & (above > count)
                high = tl.where(first_count < count, one_up, tl.where(second_count < count, two_up,
                                tl.where(third_count < count, three_up, high)))  # fmt: skip
                above = tl.where(third_count >= count, third_count, tl.where(second_count >= count, second_count,
                                 tl.where(first_count >= count, first_count, above)))  # fmt: skip
                t = tl.where(third_count >= count, three_up, tl.where(second_count >= count, two_up,
                             tl.where(first_count >= count, one_up, t)))  # fmt: skip
                going = tl.max((between & (above > count)).to(tl.int32), 0)
        if SHORT or searched > 0:
            least, left = edges_of(
                q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end, all_scores, t,
                CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT,
            )  # fmt: skip
            t = least
        t = halfway(left, t)
    else:
        rounds = 0
        while searched > 0:
            mass_sum, part_sum = weight_of(
                q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, all_scores, centre,
                t, e, KIND, CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT, FULL,
            )  # fmt: skip
            step = step_of(mass_sum, part_sum, e, KIND)
            t += step
            rounds += 1
            searched = tl.max((step > SETTLED * (1.0 + t)).to(tl.int32), 0)
            searched = tl.where(rounds >= ROUNDS, 0, searched)

    context = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    through = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    mass_sum = tl.zeros([BLOCK_M], tl.float32)
    part_sum = tl.zeros([BLOCK_M], tl.float32)
    if SHORT:
        context, through, mass_sum, part_sum = _mixed(
            context, through, mass_sum, part_sum, all_scores, centre, t, e,
            rows_from(values_of, keys, vn, 0, value_width, BLOCK_N, VALUE_WIDTH), drawn, first, 0, keys, rate,
            KIND, DROPOUT, GRADIENT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        for n in range(0, whole, BLOCK_N):
            k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH, FULL)
            s = scores_at(q, k, valid_of, queries, n, first, keys, ahead, scale, False, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            v = rows_from(values_of, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH, FULL)
            context, through, mass_sum, part_sum = _mixed(
                context, through, mass_sum, part_sum, s, centre, t, e, v, drawn, first, n, keys, rate,
                KIND, DROPOUT, GRADIENT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        for n in range(whole, end, BLOCK_N):
            k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
            s = scores_at(q, k, valid_of, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            v = rows_from(values_of, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH)
            context, through, mass_sum, part_sum = _mixed(
                context, through, mass_sum, part_sum, s, centre, t, e, v, drawn, first, n, keys, rate,
                KIND, DROPOUT, GRADIENT, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    share = 1.0 / tl.where(mass_sum == 0.0, 1.0, mass_sum)
    context = context * share[:, None]

    column = tl.arange(0, VALUE_WIDTH)
    there = rows[:, None] & (column < value_width)[None, :]
    at = row[:, None] * om + column[None, :]
    tl.store(out + b * ob + h * oh + at, context.to(out.dtype.element_ty), mask=there)
    if GRADIENT:
        if KIND != TOPK:
            held = tl.where(part_sum == 0.0, 1.0, part_sum)
            at = row[:, None] * value_width + column[None, :]
            tl.store(slope + bh * queries * value_width + at, through / held[:, None], mask=there)
        tl.store(threshold + place, t, mask=rows)
        tl.store(most + place, centre, mask=rows)
        tl.store(inverse + place, share, mask=rows)


@triton.jit
def _mixed(
    context, through, mass_sum, part_sum, s, centre, t, e, v, drawn, first_query, first_key, keys, rate,
    KIND: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a block of keys adds to the contexts, and to what backward needs."""
    d = s - centre[:, None]
    if KIND == TOPK:
        mass = best_weights(s, d, t[:, None])
        part = mass
    else:
        mass, part = mass_of(d, t[:, None], e, KIND)
    mass_sum += tl.sum(mass, 1)
    if DROPOUT:
        kept = kept_in(drawn, first_query, first_key, keys, rate, BLOCK_M, BLOCK_N)
        mass = mass * kept
    context += tl.dot(mass.to(v.dtype), v, input_precision=PRECISION)
    if GRADIENT and KIND != TOPK:
        part_sum += tl.sum(part, 1)
        if DROPOUT:
            part = part * kept
        through += tl.dot(part.to(v.dtype), v, input_precision=PRECISION)
    return context, through, mass_sum, part_sum
