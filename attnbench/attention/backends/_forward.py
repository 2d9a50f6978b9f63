"""The forward Triton kernel of fused.py: sparse attention that never writes the scores.

A program takes one block of queries of one head. It goes over the keys in passes (_passes.py), until the threshold of
each row is found, and once more to mix the values. Where all keys are one block, its scores are computed once.
With e = alpha - 1 and d the scores minus their largest, alpha-entmax is `p = [1 + e (d - t)]_+^(1/e)` (_entmax.py); t
is found from below by Newton's method on `(sum p)^e = 1`, as in torch operations.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import (
    ROUNDS,
    alive_in,
    between,
    rows_from,
    scores_of,
    seen_by_all,
    store_rows,
)
from attnbench.attention.backends._dropout import drawn_for
from attnbench.attention.backends._passes import (
    counts_of,
    edges_of,
    extremes_of,
    mixed,
    mixed_of,
    root_from,
)
from attnbench.attention.climb import TOPK


@triton.jit
def forward(
    query, key, value, out, slope, threshold, most, inverse, valid, excess, found, crowded,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, count, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ROOM: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Contexts of one block of queries. For backward: slope, the mean of the values under the part that the gradient
    goes through; of each row threshold, of top-k a product, most, and inverse, by which its weights are multiplied.

    SHORT: all keys are one block, whose scores are computed once; always, but for top-k and
    with ROOM. FULL: states are as wide as their tiles.
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

    by = 1.0 if KIND == TOPK else scale  # top-k is chosen among products
    all_scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SHORT:
        k = rows_from(keys_of, keys, kn, 0, width, BLOCK_N, WIDTH)
        all_scores = scores_of(
            q, k, alive_in(valid_of, queries, 0, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N), by
        )

    t = tl.zeros([BLOCK_M], tl.float32)
    if KIND == TOPK:
        m, low, above = extremes_of(
            q, keys_of, kn, valid_of, queries, first, keys, width, ahead, by, end, all_scores,
            CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT,
        )  # fmt: skip
        centre = tl.where(m == float("-inf"), 0.0, m)  # a row without a key
        above = tl.where(rows, above, 0.0)
        t = tl.where(above > count, low, float("-inf"))
        left = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if tl.max((above > count).to(tl.int32), 0) > 0:
            t, left = _best_from(
                q, keys_of, kn, valid_of, queries, first, keys, width, ahead, by, end, all_scores, centre, t, above,
                count, CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT,
            )  # fmt: skip
        t = between(left, t, scale)
    else:
        if ROOM > 0:
            centre = tl.load(most + place, mask=row < queries, other=0.0)
            t = tl.load(threshold + place, mask=row < queries, other=0.0)
        else:
            m = tl.max(all_scores, 1)
            centre = tl.where(m == float("-inf"), 0.0, m)
        t = root_from(
            q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, all_scores, centre,
            t, e, KIND, CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT, FULL,
        )  # fmt: skip

    if SHORT:
        context = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
        through = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
        nothing = tl.zeros([BLOCK_M], tl.float32)
        v = rows_from(values_of, keys, vn, 0, value_width, BLOCK_N, VALUE_WIDTH)
        context, through, mass_sum, part_sum = mixed(
            context, through, nothing, nothing, all_scores, scale if KIND == TOPK else 1.0, centre, t, e, v, drawn,
            first, 0, keys, rate,
            KIND, DROPOUT, GRADIENT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        context, through, mass_sum, part_sum = mixed_of(
            q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, values_of, vn, value_width,
            centre, t, e, drawn, rate, KIND, CAUSAL, VALID, DROPOUT, GRADIENT, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N,
            FULL,
        )  # fmt: skip
    store_rows(
        out + b * ob + h * oh, om, slope + bh * queries * value_width, threshold, most, inverse, row, place, rows,
        context, through, mass_sum, part_sum, centre * scale if KIND == TOPK else centre, t, value_width,
        KIND, GRADIENT, VALUE_WIDTH,
    )  # fmt: skip


@triton.jit
def _best_from(
    q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end, all_scores, centre, t, above, count,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """The least of each row's `count` best products, and the best of the others. t: no higher than the first, and
    reached by `above`."""
    # The least of a row's `count` best lies in [t, high); at least `count` keys score t or more.
    high = centre + tl.maximum(tl.abs(centre), 1.0) * 1e-6
    going = 1
    turns = 0
    while going > 0:
        step = (high - t) * 0.25
        one, two, three = t + step, t + 2 * step, t + 3 * step
        first_count, second_count, third_count = counts_of(
            q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end, all_scores,
            one, two, three, CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT,
        )  # fmt: skip
        apart = (two > t) & (two < high) & (above > count)
        high = tl.where(first_count < count, one, tl.where(second_count < count, two,
                        tl.where(third_count < count, three, high)))  # fmt: skip
        above = tl.where(third_count >= count, third_count, tl.where(second_count >= count, second_count,
                         tl.where(first_count >= count, first_count, above)))  # fmt: skip
        t = tl.where(third_count >= count, three, tl.where(second_count >= count, two,
                     tl.where(first_count >= count, one, t)))  # fmt: skip
        going = tl.max((apart & (above > count)).to(tl.int32), 0)
        turns += 1
        going = tl.where(turns >= ROUNDS, 0, going)
    return edges_of(
        q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, end, all_scores, t,
        CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT,
    )  # fmt: skip
