"""The forward Triton kernel of fused.py for rows whose weights lie on few keys.

A program takes one block of queries of one head. It goes over the keys twice: for the four largest scores of each class
of keys (_classes.py), from which it has the thresholds, and to mix the values. Where some other key has a weight, too,
it goes on from there.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import (
    ROUNDS,
    between,
    rows_from,
    seen_by_all,
    store_rows,
)
from attnbench.attention.backends._classes import kth_of, root_of
from attnbench.attention.backends._dropout import drawn_for
from attnbench.attention.backends._passes import around_of, largest_of, mixed_of, root_from
from attnbench.attention.climb import ENTMAX15, TOPK, goes_on, step_of


@triton.jit
def peaks(
    query, key, value, out, slope, threshold, most, inverse, valid, excess,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, count, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLASSES: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """What `forward` makes of one block of queries. CLASSES: how many classes of keys there are."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    place, rows = bh * queries + row, row < queries
    q = rows_from(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
    keys_of, values_of, valid_of = key + b * kb + h * kh, value + b * vb + h * vh, valid + b * valid_b
    e = tl.load(excess + h)
    end, whole = keys, seen_by_all(first, keys, ahead, CAUSAL, BLOCK_N)
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)

    by = 1.0 if KIND == TOPK else scale  # top-k is chosen among products
    one, two, three, four = largest_of(
        q, keys_of, kn, valid_of, queries, first, keys, width, ahead, by, whole, end,
        CAUSAL, VALID, WIDTH, BLOCK_M, CLASSES, FULL, KIND != ENTMAX15,
    )  # fmt: skip
    m = tl.max(one, 1)
    centre = tl.where(m == float("-inf"), 0.0, m)  # a row without a key
    t = tl.zeros([BLOCK_M], tl.float32)
    if KIND == TOPK:
        t, left, sure = kth_of(one, two, three, four, count, BLOCK_M)
        unsure = rows & (sure == 0)
        high = centre  # `count` scores reach t, and fewer lie above high
        going = tl.max(unsure.to(tl.int32), 0)
        turns = 0
        while going > 0:
            middle = t + (high - t) * 0.5
            over, over_middle, next_up, below = around_of(
                q, keys_of, kn, valid_of, queries, first, keys, width, ahead, by, end, t, middle,
                CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            low, far = unsure & (over >= count), over_middle >= count
            left = tl.where(unsure, below, left)
            high = tl.where(far | (middle != middle), high, middle)
            t = tl.where(low, tl.where(far, tl.maximum(next_up, middle), next_up), t)
            going = tl.max(low.to(tl.int32), 0)
            turns += 1
            going = tl.where(turns >= ROUNDS, 0, going)
        t = between(left, t, scale)
    else:
        t, sure = root_of(one, two, three, four, centre, e, KIND, BLOCK_M)
        none = one  # of the scores of all keys, which no program holds
        if KIND != ENTMAX15:  # noqa: SIM102 - decided when compiled, so not one condition
            if tl.max((rows & (sure == 0)).to(tl.int32), 0) > 0:
                t = root_from(
                    q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, none, centre, t, e,
                    KIND, CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, False, FULL,
                )  # fmt: skip

    drawn = drawn_for(seed, bh, DROPOUT)
    context, through, mass_sum, part_sum = mixed_of(
        q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, values_of, vn, value_width,
        centre, t, e, drawn, rate,
        KIND, CAUSAL, VALID, DROPOUT, GRADIENT, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, FULL,
    )  # fmt: skip
    if KIND == ENTMAX15:  # again, where the sum of weights tells that there are others
        step = tl.where(rows, step_of(mass_sum, part_sum, e, KIND), 0.0)
        going = tl.max(goes_on(step, part_sum, t, KIND).to(tl.int32), 0)
        turns = 0
        while going > 0:
            t += step
            context, through, mass_sum, part_sum = mixed_of(
                q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, values_of, vn,
                value_width, centre, t, e, drawn, rate,
                KIND, CAUSAL, VALID, DROPOUT, GRADIENT, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, FULL,
            )  # fmt: skip
            step = tl.where(rows, step_of(mass_sum, part_sum, e, KIND), 0.0)
            turns += 1
            going = tl.max(goes_on(step, part_sum, t, KIND).to(tl.int32), 0)
            going = tl.where(turns >= ROUNDS, 0, going)
    store_rows(
        out + b * ob + h * oh, om, slope + bh * queries * value_width, threshold, most, inverse, row, place, rows,
        context, through, mass_sum, part_sum, centre * scale if KIND == TOPK else centre, t, value_width,
        KIND, GRADIENT, VALUE_WIDTH,
    )  # fmt: skip
