"""The backward Triton kernels of fused.py: gradients from thresholds, with scores computed anew (_forward.py).

A program takes one block of queries or of keys of one head, or a head whose keys are one block.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import (
    PRECISION,
    alive_in,
    factor_of,
    kept_of_rows,
    mean_of,
    rows_from,
    scores_at,
    scores_of,
    seen_by_all,
    shift_of,
    weights_at,
)
from attnbench.attention.backends._dropout import drawn_for, kept_at, kept_in
from attnbench.attention.climb import ENTMAX15, SMALL, SPARSEMAX, TOPK, log_over_e


@triton.jit
def _shift_of(t, centre, share, e, KIND: tl.constexpr):
    """One number of a row for three, each of which a program of keys would hold many times; NaN where share is, which
    values that top-k leaves out do not hear of."""
    shift = shift_of(t, centre, e, KIND)
    return tl.log2(share) + shift if KIND == TOPK else shift + (share - share)


@triton.jit
def _weights(s, t, shift, share, factor, e, KIND: tl.constexpr):
    """The weights of a block, and the part of them that the gradient goes through. t, shift, share: of each row, along
    the rows of the scores. By sparsemax and entmax-1.5 weights sum to 1, but for rounding, and `share` has no use."""
    mass, part = weights_at(s, t, shift, factor, e, KIND)
    if KIND != TOPK and KIND != SPARSEMAX and KIND != ENTMAX15:
        mass = mass * share
    return mass, part


@triton.jit
def _moved(gain, part, middle):
    """The gradient of a block's scores, but for the scale. NaN in a value or in what came back is NaN for keys without
    a weight, too, as in the definition."""
    return part * (gain - middle)


@triton.jit
def _of_alpha(x, gain, mass, part, e):
    """What the gradient for alpha is made of, of a block of keys.

    With l = log p, g = (e^(-e l) - 1 + e l) / e^2, and sums over the row H = -sum p l, M = sum p g, weights move with
    alpha as `p (M - g - (H + e M) l - H m) / (1 + e H + e^2 M)`, with m = e g - l: proposition 1 of Correia et al. 2019
    without its differences of near equals over e. part: times the row's inverse, like the mass.
    """
    once = tl.where(mass > 0.0, log_over_e(x, e), 0.0)  # log p
    w = -e * once
    series = mass * once * once * (1 / 2 + w * (1 / 6 + w * (1 / 24 + w * (1 / 120 + w / 720))))
    twice = tl.where(tl.abs(w) < SMALL, series, (part - mass + e * mass * once) * (1.0 / (e * e)))
    once = mass * once
    return (
        tl.sum(gain * mass, 1), tl.sum(gain * once, 1), tl.sum(gain * twice, 1), tl.sum(once, 1), tl.sum(twice, 1)
    )  # fmt: skip


@triton.jit
def _slope_of_alpha(gain_0, gain_1, gain_2, sum_1, sum_2, e):
    """The gradient for alpha of each row."""
    moved = sum_2 * (gain_0 - e * gain_1) - gain_2 * (1.0 - e * sum_1)
    return moved / (1.0 + e * (e * sum_2 - sum_1))


@triton.jit
def backward_query(
    query, key, value, upstream, slope, mean, shift, threshold, most, inverse, valid, excess, found, crowded,
    query_slope, alpha_slope,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, sb, sh, sm, gb, gh, gm, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, LEARNED: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROOM: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries, and what those of keys need: mean and shift of each row. slope: as forward
    left it; where it leaves none, the contexts. ROOM: as there.
    LEARNED: also each row's gradient for alpha. FULL: as there."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    place = bh * queries + row
    there = row < queries
    if ROOM > 0:
        if tl.load(crowded + bh) == 0:
            return
        there = there & (tl.load(found + place, mask=there, other=0) > ROOM)
        if tl.max(there.to(tl.int32), 0) == 0:
            return
    q = rows_from(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
    up = rows_from(upstream + b * ob + h * oh, queries, om, first, value_width, BLOCK_M, VALUE_WIDTH)
    t, centre, share = kept_of_rows(threshold, most, inverse, place, there)
    middle = mean_of(up, slope + b * sb + h * sh, sm, mean, row, place, there, value_width, VALUE_WIDTH)
    e = tl.load(excess + h)
    below = _shift_of(t, centre, share, e, KIND)
    tl.store(shift + place, below, mask=there)
    # scores, where ptxas lacks registers for products in tiles of these kinds, and runs them one by one
    by = 1.0 if KIND == TOPK else scale
    factor = factor_of(scale if KIND == TOPK else 1.0, e, KIND)
    drawn = drawn_for(seed, bh, DROPOUT)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)
    whole = seen_by_all(first, keys, ahead, CAUSAL, BLOCK_N)
    of_query = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    gain_0 = tl.zeros([BLOCK_M], tl.float32)
    gain_1 = tl.zeros([BLOCK_M], tl.float32)
    gain_2 = tl.zeros([BLOCK_M], tl.float32)
    sum_1 = tl.zeros([BLOCK_M], tl.float32)
    sum_2 = tl.zeros([BLOCK_M], tl.float32)
    keys_of, values_of, valid_of = key + b * kb + h * kh, value + b * vb + h * vh, valid + b * valid_b
    for n in range(0, whole, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH, FULL)
        v = rows_from(values_of, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH, FULL)
        s = scores_at(q, k, valid_of, queries, n, first, keys, ahead, by, False, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        of_query, gain_0, gain_1, gain_2, sum_1, sum_2 = _of_keys(
            of_query, gain_0, gain_1, gain_2, sum_1, sum_2, s, k, v, up, t, below, share, middle, factor, e, drawn,
            first, n, keys, rate, KIND, DROPOUT, LEARNED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    for n in range(whole, end, BLOCK_N):
        k = rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)
        v = rows_from(values_of, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH)
        s = scores_at(q, k, valid_of, queries, n, first, keys, ahead, by, True, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        of_query, gain_0, gain_1, gain_2, sum_1, sum_2 = _of_keys(
            of_query, gain_0, gain_1, gain_2, sum_1, sum_2, s, k, v, up, t, below, share, middle, factor, e, drawn,
            first, n, keys, rate, KIND, DROPOUT, LEARNED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    column = tl.arange(0, WIDTH)
    at = row[:, None] * gm + column[None, :]
    tl.store(
        query_slope + b * gb + h * gh + at, (of_query * scale).to(query_slope.dtype.element_ty),
        mask=there[:, None] & (column < width)[None, :],
    )  # fmt: skip
    if LEARNED:
        tl.store(alpha_slope + place, _slope_of_alpha(gain_0, gain_1, gain_2, sum_1, sum_2, e), mask=there)


@triton.jit
def _of_keys(
    of_query, gain_0, gain_1, gain_2, sum_1, sum_2, s, k, v, up, t, shift, share, middle, factor, e, drawn,
    first_query, first_key, keys, rate,
    KIND: tl.constexpr, DROPOUT: tl.constexpr, LEARNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a block of keys adds to the gradients of queries, but for the scale, and to the sums for that of alpha."""
    mass, part = _weights(s, t[:, None], shift[:, None], share[:, None], factor, e, KIND)
    gain = tl.dot(up, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        gain = gain * kept_in(drawn, first_query, first_key, keys, rate, BLOCK_M, BLOCK_N)
    if LEARNED:
        sums = _of_alpha(s * factor + shift[:, None], gain, mass, part * share[:, None], e)
        gain_0 += sums[0]
        gain_1 += sums[1]
        gain_2 += sums[2]
        sum_1 += sums[3]
        sum_2 += sums[4]
    changed = _moved(gain, part, middle[:, None])
    of_query += tl.dot(changed.to(k.dtype), k, input_precision=PRECISION)
    return of_query, gain_0, gain_1, gain_2, sum_1, sum_2


@triton.jit
def backward_key(
    query, key, value, upstream, mean, shift, threshold, inverse, valid, excess, found, crowded, key_slope, value_slope,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, gb, gh, gn, wb, wh, wn, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROOM: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values. ROOM: as in forward; what other rows gave is there, and added to.
    EVEN: queries are whole blocks, and states as wide as their tiles."""
    blocks = tl.cdiv(keys, BLOCK_N)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    if ROOM > 0:  # noqa: SIM102 - decided when compiled, so not one condition
        if tl.load(crowded + bh) == 0:
            return
    n = block * BLOCK_N
    k = rows_from(key + b * kb + h * kh, keys, kn, n, width, BLOCK_N, WIDTH)
    v = rows_from(value + b * vb + h * vh, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH)
    e = tl.load(excess + h)
    drawn = drawn_for(seed, bh, DROPOUT)
    of_key = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    of_value = tl.zeros([BLOCK_N, VALUE_WIDTH], tl.float32)
    queries_of, ups_of, place = query + b * qb + h * qh, upstream + b * ob + h * oh, bh * queries
    threshold, shift, inverse, mean, found = (
        threshold + place, shift + place, inverse + place, mean + place, found + place
    )  # fmt: skip
    begin, clear = 0, 0
    if CAUSAL:  # queries from `clear` on stand behind all of these keys
        begin = tl.maximum(0, n - ahead) // BLOCK_M * BLOCK_M
        clear = tl.minimum(tl.cdiv(tl.maximum(0, n + BLOCK_N - 1 - ahead), BLOCK_M) * BLOCK_M, queries)
    if CAUSAL:
        for first in range(begin, clear, BLOCK_M):
            of_key, of_value = _of_queries(
                of_key, of_value, k, v, queries_of, ups_of, threshold, shift, inverse, mean, found, qm, om, first, n,
                queries, keys, width, value_width, ahead, scale, e, drawn, rate,
                KIND, CAUSAL, DROPOUT, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, ROOM, False,
            )  # fmt: skip
    for first in range(clear, queries, BLOCK_M):
        of_key, of_value = _of_queries(
            of_key, of_value, k, v, queries_of, ups_of, threshold, shift, inverse, mean, found, qm, om, first, n,
            queries, keys, width, value_width, ahead, scale, e, drawn, rate,
            KIND, False, DROPOUT, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, ROOM, EVEN,
        )  # fmt: skip
    of_key = of_key * scale
    if VALID:  # a key that nobody looks at has gradients of 0
        at = n + tl.arange(0, BLOCK_N)
        seen = (tl.load(valid + b * valid_b + at, mask=at < keys, other=0) != 0)[:, None]
        of_key, of_value = tl.where(seen, of_key, 0.0), tl.where(seen, of_value, 0.0)
    row = n + tl.arange(0, BLOCK_N)
    for_key, for_value = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    of_keys = key_slope + b * gb + h * gh + row[:, None] * gn + for_key[None, :]
    of_values = value_slope + b * wb + h * wh + row[:, None] * wn + for_value[None, :]
    key_there = (row < keys)[:, None] & (for_key < width)[None, :]
    value_there = (row < keys)[:, None] & (for_value < value_width)[None, :]
    if ROOM > 0:
        of_key += tl.load(of_keys, mask=key_there, other=0.0)
        of_value += tl.load(of_values, mask=value_there, other=0.0)
    tl.store(of_keys, of_key.to(key_slope.dtype.element_ty), mask=key_there)
    tl.store(of_values, of_value.to(value_slope.dtype.element_ty), mask=value_there)


@triton.jit
def _of_queries(
    of_key, of_value, k, v, queries_of, ups_of, threshold, shift, inverse, mean, found, qm, om, first, first_key,
    queries, keys, width, value_width, ahead, scale, e, drawn, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROOM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What a block of queries adds to the gradients of keys, but for the scale, and of values. Scores lie the other
    way, [BLOCK_N, BLOCK_M]: weights then need not be turned to be multiplied. Beyond the last query all is 0."""
    row = first + tl.arange(0, BLOCK_M)
    rows = row < queries
    going = 1
    if ROOM > 0:
        rows = rows & (tl.load(found + row, mask=rows, other=0) > ROOM)
        going = tl.max(rows.to(tl.int32), 0)
    if going > 0:
        q = rows_from(queries_of, queries, qm, first, width, BLOCK_M, WIDTH, WHOLE)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        at = first_key + tl.arange(0, BLOCK_N)
        if CAUSAL:
            s = tl.where(at[:, None] <= row[None, :] + ahead, s, float("-inf"))
        if ROOM > 0:
            s = tl.where(rows[None, :], s, float("-inf"))
        if WHOLE and ROOM == 0:
            t, below, share = tl.load(threshold + row), tl.load(shift + row), tl.load(inverse + row)
        else:
            t, below = tl.load(threshold + row, mask=rows, other=0.0), tl.load(shift + row, mask=rows, other=0.0)
            share = tl.load(inverse + row, mask=rows, other=0.0)
        factor = factor_of(scale, e, KIND)
        mass, part = _weights(s, t[None, :], below[None, :], share[None, :], factor, e, KIND)
        if CAUSAL:  # NaN of a row is none of the values that it does not see
            mass = tl.where(at[:, None] <= row[None, :] + ahead, mass, 0.0)
        # in this order: the weights are no longer held when gains are computed
        up = rows_from(ups_of, queries, om, first, value_width, BLOCK_M, VALUE_WIDTH, WHOLE)
        if DROPOUT:
            kept = kept_at(drawn, row[None, :], at[:, None], keys, rate)
            mass = mass * kept
        of_value += tl.dot(mass.to(up.dtype), up, input_precision=PRECISION)
        gain = tl.dot(v, tl.trans(up), input_precision=PRECISION)
        if DROPOUT:
            gain = gain * kept
        middle = tl.load(mean + row) if WHOLE and ROOM == 0 else tl.load(mean + row, mask=rows, other=0.0)
        of_key += tl.dot(_moved(gain, part, middle[None, :]).to(q.dtype), q, input_precision=PRECISION)
    return of_key, of_value


@triton.jit
def backward_short(
    query, key, value, upstream, slope, mean, threshold, most, inverse, valid, excess,
    query_slope, alpha_slope, key_slope, value_slope,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, sb, sh, sm, gb, gh, gm, cb, ch, cn, wb, wh, wn, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, LEARNED: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All gradients of one head whose keys are one block: scores and weights are computed once for them."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    k = rows_from(key + b * kb + h * kh, keys, kn, 0, width, BLOCK_N, WIDTH)
    v = rows_from(value + b * vb + h * vh, keys, vn, 0, value_width, BLOCK_N, VALUE_WIDTH)
    e = tl.load(excess + h)
    drawn = drawn_for(seed, bh, DROPOUT)
    of_key = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    of_value = tl.zeros([BLOCK_N, VALUE_WIDTH], tl.float32)
    narrow, wide = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    for first in range(0, queries, BLOCK_M):
        q = rows_from(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
        up = rows_from(upstream + b * ob + h * oh, queries, om, first, value_width, BLOCK_M, VALUE_WIDTH)
        row = first + tl.arange(0, BLOCK_M)
        place, rows = bh * queries + row, row < queries
        t, centre, share = kept_of_rows(threshold, most, inverse, place, rows)
        middle = mean_of(up, slope + b * sb + h * sh, sm, mean, row, place, rows, value_width, VALUE_WIDTH)
        alive = alive_in(valid + b * valid_b, queries, 0, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        s = scores_of(q, k, alive, 1.0)
        below, factor = _shift_of(t, centre, share, e, KIND), factor_of(scale, e, KIND)
        mass, part = _weights(s, t[:, None], below[:, None], share[:, None], factor, e, KIND)
        mass, part = tl.where(alive, mass, 0.0), tl.where(alive, part, 0.0)
        gain = tl.dot(up, tl.trans(v), input_precision=PRECISION)
        weight = mass
        if DROPOUT:
            kept = kept_in(drawn, first, 0, keys, rate, BLOCK_M, BLOCK_N)
            gain = gain * kept
            weight = mass * kept
        if LEARNED:
            sums = _of_alpha(s * factor + below[:, None], gain, mass, part * share[:, None], e)
            moved = _slope_of_alpha(sums[0], sums[1], sums[2], sums[3], sums[4], e)
            tl.store(alpha_slope + place, moved, mask=rows)
        changed = _moved(gain, part, middle[:, None]) * scale
        of_query = tl.dot(changed.to(k.dtype), k, input_precision=PRECISION)
        tl.store(
            query_slope + b * gb + h * gh + row[:, None] * gm + narrow[None, :],
            of_query.to(query_slope.dtype.element_ty), mask=rows[:, None] & (narrow < width)[None, :],
        )  # fmt: skip
        of_value += tl.dot(tl.trans(weight).to(up.dtype), up, input_precision=PRECISION)
        of_key += tl.dot(tl.trans(changed).to(q.dtype), q, input_precision=PRECISION)
    at = tl.arange(0, BLOCK_N)
    tl.store(
        key_slope + b * cb + h * ch + at[:, None] * cn + narrow[None, :], of_key.to(key_slope.dtype.element_ty),
        mask=(at < keys)[:, None] & (narrow < width)[None, :],
    )  # fmt: skip
    tl.store(
        value_slope + b * wb + h * wh + at[:, None] * wn + wide[None, :], of_value.to(value_slope.dtype.element_ty),
        mask=(at < keys)[:, None] & (wide < value_width)[None, :],
    )  # fmt: skip
