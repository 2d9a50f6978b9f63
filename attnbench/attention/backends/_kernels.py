"""Triton kernels of fused.py: sparse attention that never writes the scores, forward and backward.

A program takes one block of queries (or of keys) of one head. The scores of a block of keys are computed anew wherever
they are needed: to find the threshold of each row, to mix the values, and for the gradients.
With e = alpha - 1 and d the scores minus their largest, alpha-entmax is `p = [1 + e (d - t)]_+^(1/e)` (_entmax.py); t
is found from below by Newton's method on `(sum p)^e = 1`, as in torch operations.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.transforms._climb import SETTLED, SMALL, TOPK, log_over_e, mass_of, step_of

PRECISION: tl.constexpr = tl.constexpr("tf32x3")
"""Of products in float32, to about its own accuracy; other types know one precision."""
ROUNDS: tl.constexpr = tl.constexpr(200)
"""Searches end long before; what has no root (NaN) ends here."""


@triton.jit
def _load(start, rows, row_stride, begin, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Rows from `begin` on of a matrix in memory; 0 beyond its ends."""
    row = begin + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (column < width)[None, :]
    return tl.load(start + row[:, None] * row_stride + column[None, :], mask=there, other=0.0)


@triton.jit
def _alive(valid, rows, first_key, first_query, keys, ahead, CAUSAL: tl.constexpr, VALID: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Which keys of a block the queries of a block may look at. ahead: the position of query 0 among the keys."""
    k = first_key + tl.arange(0, BLOCK_N)
    q = first_query + tl.arange(0, BLOCK_M)
    alive = (q < rows)[:, None] & (k < keys)[None, :]
    if VALID:
        alive = alive & (tl.load(valid + k, mask=k < keys, other=0) != 0)[None, :]
    if CAUSAL:
        alive = alive & (k[None, :] <= q[:, None] + ahead)
    return alive


@triton.jit
def _scores(q, k, alive, scale):
    """-inf where a key is not looked at."""
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return tl.where(alive, products * scale, float("-inf"))


@triton.jit
def _drawn(seed, bh, DROPOUT: tl.constexpr):
    """What seeds the dropout of one head. seed: where it lies on the device, on which it is drawn for each call."""
    drawn = bh
    if DROPOUT:
        drawn += tl.load(seed)
    return drawn


@triton.jit
def _kept(seed, first_query, first_key, keys, rate, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What dropout multiplies the weights of a block by; the same wherever it is asked for."""
    q = first_query + tl.arange(0, BLOCK_M)
    k = first_key + tl.arange(0, BLOCK_N)
    return _kept_at(seed, q[:, None], k[None, :], keys, rate)


@triton.jit
def _kept_at(seed, q, k, keys, rate):
    return tl.where(tl.rand(seed, q * keys + k) >= rate, 1.0 / (1.0 - rate), 0.0)


@triton.jit
def _between(left, least):
    """Halfway from the best key that is left out to the least that is not, so that a score that is rounded otherwise
    falls on the same side."""
    middle = left + (least - left) * 0.5
    return tl.where(left == float("-inf"), left, tl.where(middle > left, middle, least))


@triton.jit
def forward(
    query, key, value, out, slope, threshold, most, total, valid, excess, found,
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
    q = _load(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
    keys_of, values_of, valid_of = key + b * kb + h * kh, value + b * vb + h * vh, valid + b * valid_b
    e = tl.load(excess + h)
    drawn = _drawn(seed, bh, DROPOUT)
    row = first + tl.arange(0, BLOCK_M)
    place = bh * queries + row
    rows = row < queries
    if ROOM > 0:
        number = tl.load(found + place, mask=rows, other=0)
        rows = rows & (number > ROOM)
        if tl.max(rows.to(tl.int32), 0) == 0:
            return
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)

    if SHORT:
        all_alive = _alive(valid_of, queries, 0, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        all_scores = _scores(q, _load(keys_of, keys, kn, 0, width, BLOCK_N, WIDTH), all_alive, scale)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    low = tl.full([BLOCK_M], float("inf"), tl.float32)
    living = tl.zeros([BLOCK_M], tl.float32)
    t = tl.zeros([BLOCK_M], tl.float32)
    if ROOM > 0 and KIND != TOPK:
        centre = tl.load(most + place, mask=rows, other=0.0)
        t = tl.load(threshold + place, mask=rows, other=0.0)
    else:
        for n in range(0, end, BLOCK_N):
            if SHORT:
                alive, s = all_alive, all_scores
            else:
                alive = _alive(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
                s = _scores(q, _load(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
            m = tl.maximum(m, tl.max(s, 1), propagate_nan=tl.PropagateNan.ALL)
            low = tl.minimum(low, tl.min(tl.where(alive, s, float("inf")), 1))
            living += tl.sum(alive.to(tl.float32), 1)
        centre = tl.where(m == float("-inf"), 0.0, m)  # a row without a key
        if KIND == TOPK:
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
                        alive = _alive(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
                        s = _scores(q, _load(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
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
                    alive = _alive(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
                    s = _scores(q, _load(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
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
            alive = _alive(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            s = _scores(q, _load(keys_of, keys, kn, n, width, BLOCK_N, WIDTH), alive, scale)
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
            kept = _kept(drawn, first, n, keys, rate, BLOCK_M, BLOCK_N)
            mass = mass * kept
        v = _load(values_of, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH)
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
            t = _between(left, least)
        else:
            held = tl.where(part_sum == 0.0, 1.0, part_sum)
            at = row[:, None] * value_width + column[None, :]
            tl.store(slope + bh * queries * value_width + at, through / held[:, None], mask=there)
        tl.store(threshold + place, t, mask=rows)
        tl.store(most + place, centre, mask=rows)
        tl.store(total + place, shared, mask=rows)


@triton.jit
def _of_rows(threshold, most, total, place, there):
    """What forward kept of each row."""
    t = tl.load(threshold + place, mask=there, other=0.0)
    centre = tl.load(most + place, mask=there, other=0.0)
    shared = tl.load(total + place, mask=there, other=1.0)
    return t, centre, shared


@triton.jit
def _mean(up, slope, row_stride, mean, row, place, there, value_width, VALUE_WIDTH: tl.constexpr):
    """Of the gradient of each row's weights, under the part that it goes through; kept in `mean`."""
    column = tl.arange(0, VALUE_WIDTH)
    inside = there[:, None] & (column < value_width)[None, :]
    of_row = tl.load(slope + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(up.to(tl.float32) * of_row, 1)
    tl.store(mean + place, middle, mask=there)
    return middle


@triton.jit
def _weights(s, alive, t, centre, total, e, KIND: tl.constexpr):
    """The weights of a block, and the part of them that the gradient goes through."""
    d = s - centre[:, None]
    if KIND == TOPK:
        mass = tl.where((s >= t[:, None]) | (d != d), tl.exp(d), 0.0) / total[:, None]
        part = mass
    else:
        mass, part = mass_of(d, t[:, None], e, KIND)
        mass = mass / total[:, None]
    return tl.where(alive, mass, 0.0), tl.where(alive, part, 0.0)


@triton.jit
def _of_alpha(d, gain, mass, part, t, e):
    """What the gradient for alpha is made of, of a block of keys.

    With l = log p, g = (e^(-e l) - 1 + e l) / e^2, and sums over the row H = -sum p l, M = sum p g, weights move with
    alpha as `p (M - g - (H + e M) l - H m) / (1 + e H + e^2 M)`, with m = e g - l: proposition 1 of Correia et al. 2019
    without its differences of near equals over e. part: over the row's total, like the mass.
    """
    once = tl.where(mass > 0.0, log_over_e(d, t[:, None], e), 0.0)  # log p
    w = -e * once
    series = mass * once * once * (1 / 2 + w * (1 / 6 + w * (1 / 24 + w * (1 / 120 + w / 720))))
    twice = tl.where(tl.abs(w) < SMALL, series, (part - mass + e * mass * once) / (e * e))
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
    query, key, value, upstream, slope, mean, threshold, most, total, valid, excess, found, query_slope, alpha_slope,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, sb, sh, sm, gb, gh, gm, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, LEARNED: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries. slope: as forward left it; where it leaves none, the contexts. ROOM: as there.
    LEARNED: also each row's gradient for alpha."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = block * BLOCK_M
    q = _load(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
    up = _load(upstream + b * ob + h * oh, queries, om, first, value_width, BLOCK_M, VALUE_WIDTH)
    row = first + tl.arange(0, BLOCK_M)
    place = bh * queries + row
    there = row < queries
    if ROOM > 0:
        there = there & (tl.load(found + place, mask=there, other=0) > ROOM)
        if tl.max(there.to(tl.int32), 0) == 0:
            return
    t, centre, shared = _of_rows(threshold, most, total, place, there)
    middle = _mean(up, slope + b * sb + h * sh, sm, mean, row, place, there, value_width, VALUE_WIDTH)
    e = tl.load(excess + h)
    drawn = _drawn(seed, bh, DROPOUT)
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)
    of_query = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    gain_0 = tl.zeros([BLOCK_M], tl.float32)
    gain_1 = tl.zeros([BLOCK_M], tl.float32)
    gain_2 = tl.zeros([BLOCK_M], tl.float32)
    sum_1 = tl.zeros([BLOCK_M], tl.float32)
    sum_2 = tl.zeros([BLOCK_M], tl.float32)
    for n in range(0, end, BLOCK_N):
        alive = _alive(valid + b * valid_b, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        k = _load(key + b * kb + h * kh, keys, kn, n, width, BLOCK_N, WIDTH)
        v = _load(value + b * vb + h * vh, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH)
        s = _scores(q, k, alive, scale)
        mass, part = _weights(s, alive, t, centre, shared, e, KIND)
        gain = tl.dot(up, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            gain = gain * _kept(drawn, first, n, keys, rate, BLOCK_M, BLOCK_N)
        if LEARNED:
            sums = _of_alpha(s - centre[:, None], gain, mass, part / shared[:, None], t, e)
            gain_0 += sums[0]
            gain_1 += sums[1]
            gain_2 += sums[2]
            sum_1 += sums[3]
            sum_2 += sums[4]
        changed = tl.where(part == 0.0, 0.0, part * (gain - middle[:, None]) * scale)
        of_query += tl.dot(changed.to(k.dtype), k, input_precision=PRECISION)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * gm + column[None, :]
    tl.store(
        query_slope + b * gb + h * gh + at, of_query.to(query_slope.dtype.element_ty),
        mask=there[:, None] & (column < width)[None, :],
    )  # fmt: skip
    if LEARNED:
        tl.store(alpha_slope + place, _slope_of_alpha(gain_0, gain_1, gain_2, sum_1, sum_2, e), mask=there)


@triton.jit
def backward_key(
    query, key, value, upstream, mean, threshold, most, total, valid, excess, found, crowded, key_slope, value_slope,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, gb, gh, gn, wb, wh, wn, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values. ROOM: as in forward; what other rows gave is there, and added to."""
    blocks = tl.cdiv(keys, BLOCK_N)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    if ROOM > 0:  # noqa: SIM102 - decided when compiled, so not one condition
        if tl.load(crowded + bh) == 0:
            return
    n = block * BLOCK_N
    k = _load(key + b * kb + h * kh, keys, kn, n, width, BLOCK_N, WIDTH)
    v = _load(value + b * vb + h * vh, keys, vn, n, value_width, BLOCK_N, VALUE_WIDTH)
    e = tl.load(excess + h)
    drawn = _drawn(seed, bh, DROPOUT)
    of_key = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    of_value = tl.zeros([BLOCK_N, VALUE_WIDTH], tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, n - ahead) // BLOCK_M * BLOCK_M
    for first in range(begin, queries, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        rows = row < queries
        if ROOM > 0:
            rows = rows & (tl.load(found + bh * queries + row, mask=rows, other=0) > ROOM)
            going = tl.max(rows.to(tl.int32), 0)
        else:
            going = 1
        if going > 0:
            q = _load(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
            up = _load(upstream + b * ob + h * oh, queries, om, first, value_width, BLOCK_M, VALUE_WIDTH)
            t, centre, shared = _of_rows(threshold, most, total, bh * queries + row, rows)
            middle = tl.load(mean + bh * queries + row, mask=rows, other=0.0)
            alive = _alive(valid + b * valid_b, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
            alive = alive & rows[:, None]
            s = _scores(q, k, alive, scale)
            mass, part = _weights(s, alive, t, centre, shared, e, KIND)
            slope = tl.dot(up, tl.trans(v), input_precision=PRECISION)
            if DROPOUT:
                kept = _kept(drawn, first, n, keys, rate, BLOCK_M, BLOCK_N)
                slope = slope * kept
                mass = mass * kept
            changed = tl.where(part == 0.0, 0.0, part * (slope - middle[:, None]) * scale)
            of_value += tl.dot(tl.trans(mass).to(up.dtype), up, input_precision=PRECISION)
            of_key += tl.dot(tl.trans(changed).to(q.dtype), q, input_precision=PRECISION)
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
def backward_short(
    query, key, value, upstream, slope, mean, threshold, most, total, valid, excess,
    query_slope, alpha_slope, key_slope, value_slope,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, sb, sh, sm, gb, gh, gm, cb, ch, cn, wb, wh, wn, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, LEARNED: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All gradients of one head whose keys are one block: scores and weights are computed once for them."""
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // heads, bh % heads
    k = _load(key + b * kb + h * kh, keys, kn, 0, width, BLOCK_N, WIDTH)
    v = _load(value + b * vb + h * vh, keys, vn, 0, value_width, BLOCK_N, VALUE_WIDTH)
    e = tl.load(excess + h)
    drawn = _drawn(seed, bh, DROPOUT)
    of_key = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    of_value = tl.zeros([BLOCK_N, VALUE_WIDTH], tl.float32)
    narrow, wide = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    for first in range(0, queries, BLOCK_M):
        q = _load(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
        up = _load(upstream + b * ob + h * oh, queries, om, first, value_width, BLOCK_M, VALUE_WIDTH)
        row = first + tl.arange(0, BLOCK_M)
        place, rows = bh * queries + row, row < queries
        t, centre, shared = _of_rows(threshold, most, total, place, rows)
        middle = _mean(up, slope + b * sb + h * sh, sm, mean, row, place, rows, value_width, VALUE_WIDTH)
        alive = _alive(valid + b * valid_b, queries, 0, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        s = _scores(q, k, alive, scale)
        mass, part = _weights(s, alive, t, centre, shared, e, KIND)
        gain = tl.dot(up, tl.trans(v), input_precision=PRECISION)
        weight = mass
        if DROPOUT:
            kept = _kept(drawn, first, 0, keys, rate, BLOCK_M, BLOCK_N)
            gain = gain * kept
            weight = mass * kept
        if LEARNED:
            sums = _of_alpha(s - centre[:, None], gain, mass, part / shared[:, None], t, e)
            moved = _slope_of_alpha(sums[0], sums[1], sums[2], sums[3], sums[4], e)
            tl.store(alpha_slope + place, moved, mask=rows)
        changed = tl.where(part == 0.0, 0.0, part * (gain - middle[:, None]) * scale)
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
