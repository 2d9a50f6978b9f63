"""Passes over the keys of a block of queries, in which scores are computed anew (_forward.py, _peaks.py).

Where most rows need a pass, blocks of keys behind which all queries stand are not masked.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import (
    PRECISION,
    ROUNDS,
    factor_of,
    rows_from,
    scores_at,
    sums_of,
)
from attnbench.attention.backends._classes import taken, taken_pair
from attnbench.attention.backends._dropout import kept_in
from attnbench.attention.climb import TOPK, goes_on, mass_of, step_of


@triton.jit
def largest_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, whole, end,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, CLASSES: tl.constexpr, FULL: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """The four largest scores of each class of keys (_classes.py), for a scale above 0; for one of 1 these are
    products. PAIR: two blocks at a time."""
    one = tl.full([BLOCK_M, CLASSES], float("-inf"), tl.float32)
    two, three, four = one, one, one
    paired = 0
    if PAIR:
        paired = whole // (2 * CLASSES) * (2 * CLASSES)
        for n in range(0, paired, 2 * CLASSES):
            k = rows_from(keys_of, keys, kn, n, width, CLASSES, WIDTH, FULL)
            s = scores_at(q, k, valid, queries, n, first, keys, ahead, 1.0, False, CAUSAL, VALID, BLOCK_M, CLASSES)
            at = n + CLASSES
            k = rows_from(keys_of, keys, kn, at, width, CLASSES, WIDTH, FULL)
            other = scores_at(q, k, valid, queries, at, first, keys, ahead, 1.0, False, CAUSAL, VALID, BLOCK_M, CLASSES)
            one, two, three, four = taken_pair(s, other, one, two, three, four)
    for n in range(paired, whole, CLASSES):
        k = rows_from(keys_of, keys, kn, n, width, CLASSES, WIDTH, FULL)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, 1.0, False, CAUSAL, VALID, BLOCK_M, CLASSES)
        one, two, three, four = taken(s, one, two, three, four)
    for n in range(whole, end, CLASSES):
        k = rows_from(keys_of, keys, kn, n, width, CLASSES, WIDTH)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, 1.0, True, CAUSAL, VALID, BLOCK_M, CLASSES)
        one, two, three, four = taken(s, one, two, three, four)
    return one * scale, two * scale, three * scale, four * scale


@triton.jit
def best_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, end,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest score of each class of keys."""
    best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    for n in range(0, end, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        best = tl.maximum(best, s)
    return best


@triton.jit
def extremes_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, end, all_scores,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """The largest score of each row, the least, and how many there are."""
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    low = tl.full([BLOCK_M], float("inf"), tl.float32)
    living = tl.zeros([BLOCK_M], tl.float32)
    if SHORT:
        most = tl.maximum(most, tl.max(all_scores, 1))
        alive = all_scores > float("-inf")
        low = tl.minimum(low, tl.min(tl.where(alive, all_scores, float("inf")), 1))
        living += tl.sum(alive.to(tl.float32), 1)
    else:
        for n in range(0, end, BLOCK_N):
            k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
            s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            most = tl.maximum(most, tl.max(s, 1))
            alive = s > float("-inf")
            low = tl.minimum(low, tl.min(tl.where(alive, s, float("inf")), 1))
            living += tl.sum(alive.to(tl.float32), 1)
    return most, low, living


@triton.jit
def around_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, end, t, middle,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How many scores lie above `t`, and above `middle`; the least above t, and the largest below it."""
    over = tl.zeros([BLOCK_M], tl.float32)
    over_middle = tl.zeros([BLOCK_M], tl.float32)
    least = tl.full([BLOCK_M], float("inf"), tl.float32)
    left = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for n in range(0, end, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        higher = s > t[:, None]
        over += tl.sum(higher.to(tl.float32), 1)
        over_middle += tl.sum((s > middle[:, None]).to(tl.float32), 1)
        least = tl.minimum(least, tl.min(tl.where(higher, s, float("inf")), 1))
        left = tl.maximum(left, tl.max(tl.where(s < t[:, None], s, float("-inf")), 1))
    return over, over_middle, least, left


@triton.jit
def counts_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, end, all_scores, one, two, three,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """How many scores reach each of three thresholds."""
    first_count = tl.zeros([BLOCK_M], tl.float32)
    second_count = tl.zeros([BLOCK_M], tl.float32)
    third_count = tl.zeros([BLOCK_M], tl.float32)
    if SHORT:
        first_count += tl.sum((all_scores >= one[:, None]).to(tl.float32), 1)
        second_count += tl.sum((all_scores >= two[:, None]).to(tl.float32), 1)
        third_count += tl.sum((all_scores >= three[:, None]).to(tl.float32), 1)
    else:
        for n in tl.range(0, end, BLOCK_N, num_stages=1):
            k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
            s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            first_count += tl.sum((s >= one[:, None]).to(tl.float32), 1)
            second_count += tl.sum((s >= two[:, None]).to(tl.float32), 1)
            third_count += tl.sum((s >= three[:, None]).to(tl.float32), 1)
    return first_count, second_count, third_count


@triton.jit
def edges_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, end, all_scores, t,
    CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """The least score that reaches `t`, and the largest that does not."""
    least = tl.full([BLOCK_M], float("inf"), tl.float32)
    left = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SHORT:
        chosen = all_scores >= t[:, None]
        least = tl.minimum(least, tl.min(tl.where(chosen & (all_scores > float("-inf")), all_scores, float("inf")), 1))
        left = tl.maximum(left, tl.max(tl.where(chosen, float("-inf"), all_scores), 1))
    else:
        for n in tl.range(0, end, BLOCK_N, num_stages=1):
            k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
            s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            chosen = s >= t[:, None]
            least = tl.minimum(least, tl.min(tl.where(chosen & (s > float("-inf")), s, float("inf")), 1))
            left = tl.maximum(left, tl.max(tl.where(chosen, float("-inf"), s), 1))
    return least, left


@triton.jit
def weight_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, whole, end, all_scores, centre, t, e,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Of the weights of each row at threshold `t`, and of their parts."""
    mass_sum = tl.zeros([BLOCK_M], tl.float32)
    part_sum = tl.zeros([BLOCK_M], tl.float32)
    if SHORT:
        mass, part = sums_of(all_scores - centre[:, None], t, e, KIND)
        mass_sum += mass
        part_sum += part
    else:
        for n in range(0, whole, BLOCK_N):
            k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH, FULL)
            s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, False, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            mass, part = sums_of(s - centre[:, None], t, e, KIND)
            mass_sum += mass
            part_sum += part
        for n in range(whole, end, BLOCK_N):
            k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
            s = scores_at(q, k, valid, queries, n, first, keys, ahead, scale, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            mass, part = sums_of(s - centre[:, None], t, e, KIND)
            mass_sum += mass
            part_sum += part
    return mass_sum, part_sum


@triton.jit
def mixed(
    context, through, mass_sum, part_sum, s, scale, centre, t, e, v, drawn, first_query, first_key, keys, rate,
    KIND: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a block of keys adds to the contexts, and to what backward needs. s: products, scores by `scale`. centre, t:
    of top-k the largest product, and the least that is kept; of the others the largest score, and the threshold, below
    it. NaN stays NaN."""
    if KIND == TOPK:
        mass = tl.where(s < t[:, None], 0.0, tl.exp2((s - centre[:, None]) * factor_of(scale, e, KIND)))
        part = mass
    else:
        mass, part = mass_of(s * scale - centre[:, None], t[:, None], e, KIND)
    mass_sum += tl.sum(mass, 1)
    if KIND != TOPK:
        part_sum += tl.sum(part, 1)
    if DROPOUT:
        kept = kept_in(drawn, first_query, first_key, keys, rate, BLOCK_M, BLOCK_N)
        mass = mass * kept
    context += tl.dot(mass.to(v.dtype), v, input_precision=PRECISION)
    if GRADIENT and KIND != TOPK:
        if DROPOUT:
            part = part * kept
        through += tl.dot(part.to(v.dtype), v, input_precision=PRECISION)
    return context, through, mass_sum, part_sum


@triton.jit
def mixed_of(
    q, keys_of, kn, valid, queries, first, keys, width, ahead, scale, whole, end, values_of, vn, value_width,
    centre, t, e, drawn, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Values mixed by weights, and by the part of these that the gradient goes through, and the sums of both.
    centre, t: as in `mixed`."""
    context = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    through = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    mass_sum = tl.zeros([BLOCK_M], tl.float32)
    part_sum = tl.zeros([BLOCK_M], tl.float32)
    for n in range(0, whole, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH, FULL)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, 1.0, False, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        v = rows_from(values_of, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH, FULL)
        context, through, mass_sum, part_sum = mixed(
            context, through, mass_sum, part_sum, s, scale, centre, t, e, v, drawn, first, n, keys, rate,
            KIND, DROPOUT, GRADIENT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for n in range(whole, end, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
        s = scores_at(q, k, valid, queries, n, first, keys, ahead, 1.0, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        v = rows_from(values_of, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH)
        context, through, mass_sum, part_sum = mixed(
            context, through, mass_sum, part_sum, s, scale, centre, t, e, v, drawn, first, n, keys, rate,
            KIND, DROPOUT, GRADIENT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    return context, through, mass_sum, part_sum


@triton.jit
def root_from(
    q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, all_scores, centre, t, e,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The threshold of each row, by Newton's method from `t` on, which lies no higher."""
    going = 1
    rounds = 0
    while going > 0:
        mass_sum, part_sum = weight_of(
            q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, all_scores, centre,
            t, e, KIND, CAUSAL, VALID, WIDTH, BLOCK_M, BLOCK_N, SHORT, FULL,
        )  # fmt: skip
        step = step_of(mass_sum, part_sum, e, KIND)
        t += step
        rounds += 1
        going = tl.max(goes_on(step, part_sum, t, KIND).to(tl.int32), 0)
        going = tl.where(rounds >= ROUNDS, 0, going)
    return t
