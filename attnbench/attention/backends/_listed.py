"""Triton kernels of fused.py for long rows of few weights: the keys that can have one are listed, then gathered.

The largest score of each class of keys, places equal modulo 2 BLOCK_N, is found in one pass. From these alone a row's
threshold would lie no higher than it does: what is below it has no weight. A second pass lists the rest, ROOM at most;
weights, contexts and gradients are then computed from the listed keys. A row with more of them, or with a score that is
no number, is left to the kernels of _forward.py and _backward.py (`found` > ROOM).
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import (
    PRECISION,
    ROUNDS,
    alive_in,
    halfway,
    kept_of_rows,
    mean_of,
    rows_from,
    seen_by_all,
    sums_of,
)
from attnbench.attention.backends._dropout import drawn_for, kept_at
from attnbench.attention.climb import TOPK, goes_on, mass_of, step_of

LEAST: tl.constexpr = tl.constexpr(-3.0e38)
"""Below every score but that of a key that is not looked at."""
HALVINGS: tl.constexpr = tl.constexpr(10)
STEPS: tl.constexpr = tl.constexpr(6)
"""Of Newton's method on the largest scores; each leaves the threshold below the row's."""


WHOLE: tl.constexpr = tl.constexpr(8388608.0)
"""2^23, from which on a float is a whole number."""
BITS: tl.constexpr = tl.constexpr(0x4B000000)
"""Those of WHOLE."""


def _store() -> str:
    """PTX of a list's four next entries at most. Operands, four of each: nothing, product, least, slot, its limit,
    address of slot 0, column, first column, scale."""
    names = ("nothing", "product", "least", "slot", "limit", "base", "column", "first", "scale")
    of = [{name: f"${4 * number + each}" for number, name in enumerate(names)} for each in range(4)]
    chosen = [
        f"setp.ge.f32 p{each}, {o['product']}, {o['least']};"
        f"setp.lt.and.s32 p{each}, {o['slot']}, {o['limit']}, p{each};"
        for each, o in enumerate(of)
    ]
    stored = [
        f"@p{each} mad.wide.s32 to, {o['slot']}, 8, {o['base']}; mul.f32 score, {o['product']}, {o['scale']};"
        f"add.s32 place, {o['column']}, {o['first']};"
        f"@p{each} st.global.f32 [to], score; @p{each} st.global.s32 [to+4], place;"
        for each, o in enumerate(of)
    ]
    return "\n".join([
        "{ .reg .pred p0, p1, p2, p3, some; .reg .b64 to; .reg .f32 score; .reg .s32 place;", *chosen,
        "or.pred some, p0, p1; or.pred some, some, p2; or.pred some, some, p3;", "@!some bra none;", *stored,
        "none:", *(f"mov.b32 {o['nothing']}, 0;" for o in of), "}",
    ])  # fmt: skip


STORE: tl.constexpr = tl.constexpr(_store())
SLOTS: tl.constexpr = tl.constexpr(",".join(["=r"] * 4 + ["f"] * 8 + ["r"] * 8 + ["l"] * 4 + ["r"] * 8 + ["f"] * 4))


@triton.jit
def _products(q, keys_of, kn, n, keys, width, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    return tl.dot(q, tl.trans(rows_from(keys_of, keys, kn, n, width, BLOCK_N, WIDTH)), input_precision=PRECISION)


@triton.jit
def _reaching(best, other, low):
    return tl.sum((best >= low[:, None]).to(tl.int32) + (other >= low[:, None]).to(tl.int32), 1)


@triton.jit
def choose(
    query, key, lists, found, most, threshold, crowded, valid, excess,
    qb, qh, qm, kb, kh, kn, valid_b, heads, queries, keys, width, ahead, scale, count,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROOM: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """List the keys of one block of queries: the bits of the score and the place of each row's first `found`.

    crowded: of each head, whether a row of it has more than ROOM. most, threshold: where such a row's search may begin.
    """
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = block * BLOCK_M
    q = rows_from(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH)
    keys_of, valid_of = key + b * kb + h * kh, valid + b * valid_b
    e = tl.load(excess + h)
    end, whole = keys, 0
    if CAUSAL:
        end = tl.minimum(keys, first + BLOCK_M + ahead)
    if not VALID:  # blocks of keys that every query looks at
        whole = seen_by_all(first, keys, ahead, CAUSAL, BLOCK_N)

    best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    other = best  # of every second block
    paired = whole // (2 * BLOCK_N) * (2 * BLOCK_N)
    for n in range(0, paired, 2 * BLOCK_N):
        s = _products(q, keys_of, kn, n, keys, width, BLOCK_N, WIDTH)
        best = tl.maximum(best, s, propagate_nan=tl.PropagateNan.ALL)
        s = _products(q, keys_of, kn, n + BLOCK_N, keys, width, BLOCK_N, WIDTH)
        other = tl.maximum(other, s, propagate_nan=tl.PropagateNan.ALL)
    for n in range(paired, end, BLOCK_N):
        alive = alive_in(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        s = tl.where(alive, _products(q, keys_of, kn, n, keys, width, BLOCK_N, WIDTH), float("-inf"))
        if n // BLOCK_N % 2 == 0:
            best = tl.maximum(best, s, propagate_nan=tl.PropagateNan.ALL)
        else:
            other = tl.maximum(other, s, propagate_nan=tl.PropagateNan.ALL)
    best, other = best * scale, other * scale
    top = tl.maximum(tl.max(best, 1), tl.max(other, 1))
    strange = tl.max(((best != best) | (other != other)).to(tl.int32), 1) + (top == float("inf")).to(tl.int32) > 0
    centre = tl.where(top == float("-inf"), 0.0, top)
    t = tl.zeros([BLOCK_M], tl.float32)
    if KIND == TOPK:
        low = tl.minimum(
            tl.min(tl.where(best > float("-inf"), best, float("inf")), 1),
            tl.min(tl.where(other > float("-inf"), other, float("inf")), 1),
        )
        low = tl.where(_reaching(best, other, low) >= count, low, LEAST)
        high = centre
        for _ in range(HALVINGS):
            middle = low + (high - low) * 0.5
            enough = _reaching(best, other, middle) >= count
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    else:
        best, other = best - centre[:, None], other - centre[:, None]
        for _ in range(STEPS):
            mass, part = sums_of(best, t, e, KIND)
            more, rest = sums_of(other, t, e, KIND)
            t += step_of(mass + more, part + rest, e, KIND)
        low = centre + t - 1.0 / e - 1e-5 * (1.0 + tl.abs(centre))
    low = tl.maximum(low, LEAST)
    if KIND == TOPK:
        t = low

    row = first + tl.arange(0, BLOCK_M)
    place = bh * queries + row
    rows = row < queries
    # how many of a block's keys before each are listed, and how many in all: products, exact in half precision
    column = tl.arange(0, BLOCK_N)
    earlier = (column[:, None] < column[None, :]).to(tl.float16)
    all_of = tl.full([BLOCK_N, 16], 1.0, tl.float16)
    listed = tl.zeros([BLOCK_M], tl.float32)
    limit = tl.where(rows & (strange == 0), ROOM, 0)
    low = low / scale
    low = tl.maximum(low - tl.abs(low) * 1e-6, LEAST)
    lists_of = lists + (bh * queries + first) * (2 * ROOM)
    for n in range(0, whole, BLOCK_N):
        s = _products(q, keys_of, kn, n, keys, width, BLOCK_N, WIDTH)
        listed = _list(s, scale, low, listed, limit, lists_of, n, earlier, all_of, BLOCK_M, BLOCK_N, ROOM, PLAIN)
    for n in range(whole, end, BLOCK_N):
        alive = alive_in(valid_of, queries, n, first, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N)
        s = tl.where(alive, _products(q, keys_of, kn, n, keys, width, BLOCK_N, WIDTH), float("-inf"))
        listed = _list(s, scale, low, listed, limit, lists_of, n, earlier, all_of, BLOCK_M, BLOCK_N, ROOM, PLAIN)
    listed = tl.where(strange, ROOM + 1, listed.to(tl.int32))
    tl.store(found + place, listed, mask=rows)
    tl.store(most + place, centre, mask=rows)
    tl.store(threshold + place, t, mask=rows)
    if tl.max(tl.where(rows, listed, 0), 0) > ROOM:
        tl.atomic_max(crowded + bh, 1)


@triton.jit
def _list(
    s, scale, low, listed, limit, lists, n, earlier, all_of,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROOM: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Add the products that reach `low`; how many each row has then, those past its limit counted."""
    chosen = (s >= low[:, None]).to(tl.float16)
    before = tl.dot(chosen, earlier)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    if PLAIN:
        slot = (listed[:, None] + before).to(tl.int32)
        mask = (s >= low[:, None]) & (slot < limit[:, None])
        at = 2 * (row[:, None] * ROOM + slot)
        tl.store(lists + at, (s * scale).to(tl.int32, bitcast=True), mask=mask)
        tl.store(lists + at + 1, tl.broadcast_to((n + column)[None, :], s.shape), mask=mask)
    else:  # a store of Triton's would first move all scores and addresses between threads, for the few that there are
        slot = before + (listed + WHOLE)[:, None]  # its bits count up from those of WHOLE
        base = (lists + 2 * ROOM * row).to(tl.int64) - BITS * 8
        tl.inline_asm_elementwise(
            STORE, SLOTS,
            [s, low[:, None], slot.to(tl.int32, bitcast=True), (limit + BITS)[:, None], base[:, None],
             column[None, :], n, scale],
            dtype=tl.int32, is_pure=False, pack=4,
        )  # fmt: skip
    return listed + tl.max(tl.dot(chosen, all_of), 1)


@triton.jit
def mix(
    value, lists, found, out, slope, threshold, most, inverse, excess,
    vb, vh, vn, ob, oh, om, heads, queries, keys, value_width, count, seed, rate,
    KIND: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, ROOM: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Contexts of one block of queries from their listed keys. What it stores is as in `forward`, but that `most` is
    there, and that the threshold of top-k is a score; threshold and inverse of rows with more keys are left alone.
    UNROLL: listed keys fetched at once."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    place = bh * queries + row
    rows = row < queries
    number = tl.load(found + place, mask=rows, other=0)
    rows = rows & (number <= ROOM)
    number = tl.where(rows, number, 0)
    e = tl.load(excess + h)
    drawn = drawn_for(seed, bh, DROPOUT)
    column = tl.arange(0, ROOM)
    lists_of = lists + place * (2 * ROOM)
    listed = column[None, :] < number[:, None]
    s = tl.load(lists_of[:, None] + 2 * column[None, :], mask=listed, other=0).to(tl.float32, bitcast=True)
    s = tl.where(listed, s, float("-inf"))
    centre = tl.load(most + place, mask=rows, other=0.0)
    t = tl.load(threshold + place, mask=rows, other=0.0)
    d = s - centre[:, None]
    left = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if KIND == TOPK:
        stay = number
        going = 1
        turns = 0
        while going > 0:
            least = tl.min(tl.where(s > left[:, None], s, float("inf")), 1)
            rest = stay - tl.sum((s == least[:, None]).to(tl.int32), 1)
            falls = rest >= count
            left = tl.where(falls, least, left)
            stay = tl.where(falls, rest, stay)
            going = tl.max(falls.to(tl.int32), 0)
            turns += 1
            going = tl.where(turns >= ROOM, 0, going)
        least = tl.min(tl.where(s > left[:, None], s, float("inf")), 1)
        t = halfway(tl.maximum(left, t), least)
        mass = tl.where(s > left[:, None], tl.exp(d), 0.0)
        part = mass
    else:
        going = 1
        turns = 0
        while going > 0:
            mass_sum, part_sum = sums_of(d, t, e, KIND)
            step = step_of(mass_sum, part_sum, e, KIND)
            t += step
            going = tl.max(goes_on(step, part_sum, t, KIND).to(tl.int32), 0)
            turns += 1
            going = tl.where(turns >= ROUNDS, 0, going)
        mass, part = mass_of(d, t[:, None], e, KIND)
        mass, part = tl.where(s > float("-inf"), mass, 0.0), tl.where(s > float("-inf"), part, 0.0)
    shared = tl.sum(mass, 1)
    shared = tl.where(shared == 0.0, 1.0, shared)
    held = tl.sum(part, 1)
    held = tl.where(held == 0.0, 1.0, held)

    wide = tl.arange(0, VALUE_WIDTH)
    inside = (wide < value_width)[None, :]
    values_of = value + b * vb + h * vh
    context = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    through = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    for j in tl.range(0, tl.max(number, 0), loop_unroll_factor=UNROLL):
        there = j < number
        one, at = _entry(lists_of, j, there)
        if KIND == TOPK:
            weight = tl.where(one > left, tl.exp(one - centre), 0.0)
            share = weight
        else:
            weight, share = mass_of(one - centre, t, e, KIND)
            weight, share = tl.where(there, weight, 0.0), tl.where(there, share, 0.0)
        v = tl.load(values_of + at[:, None] * vn + wide[None, :], mask=(share > 0.0)[:, None] & inside, other=0.0)
        v = v.to(tl.float32)
        if DROPOUT:
            kept = kept_at(drawn, row, at, keys, rate)
            weight, share = weight * kept, share * kept
        context += weight[:, None] * v
        if GRADIENT and KIND != TOPK:
            through += share[:, None] * v
    context = context * (1.0 / shared)[:, None]
    there = rows[:, None] & inside
    tl.store(out + b * ob + h * oh + row[:, None] * om + wide[None, :], context.to(out.dtype.element_ty), mask=there)
    if GRADIENT:
        if KIND != TOPK:
            at = place[:, None] * value_width + wide[None, :]
            tl.store(slope + at, through / held[:, None], mask=there)
        tl.store(threshold + place, t, mask=rows)
        tl.store(inverse + place, 1.0 / shared, mask=rows)


@triton.jit
def _entry(lists, j, there):
    """Score and place of the j-th listed key of each row."""
    score = tl.load(lists + 2 * j, mask=there, other=0).to(tl.float32, bitcast=True)
    return tl.where(there, score, float("-inf")), tl.load(lists + 2 * j + 1, mask=there, other=0)


@triton.jit
def spread(
    query, key, value, upstream, slope, mean, lists, found, threshold, most, inverse, excess,
    query_slope, key_slope, value_slope,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, sb, sh, sm, gb, gh, gm,
    heads, queries, keys, width, value_width, scale, seed, rate,
    KIND: tl.constexpr, DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, ROOM: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries, and what it adds to those of its listed keys: key_slope, value_slope
    [B, H, K, E], in float32. The rest as in `backward_query`."""
    blocks = tl.cdiv(queries, BLOCK_M)
    block, bh = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    b, h = bh // heads, bh % heads
    first = block * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    place = bh * queries + row
    rows = row < queries
    number = tl.load(found + place, mask=rows, other=0)
    rows = rows & (number <= ROOM)
    number = tl.where(rows, number, 0)
    q = rows_from(query + b * qb + h * qh, queries, qm, first, width, BLOCK_M, WIDTH).to(tl.float32)
    up = rows_from(upstream + b * ob + h * oh, queries, om, first, value_width, BLOCK_M, VALUE_WIDTH).to(tl.float32)
    t, centre, share = kept_of_rows(threshold, most, inverse, place, rows)
    middle = mean_of(up, slope + b * sb + h * sh, sm, mean, row, place, rows, value_width, VALUE_WIDTH)
    e = tl.load(excess + h)
    drawn = drawn_for(seed, bh, DROPOUT)
    lists_of = lists + place * (2 * ROOM)
    narrow, wide = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    keys_of, values_of = key + b * kb + h * kh, value + b * vb + h * vh
    of_query = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for j in tl.range(0, tl.max(number, 0), loop_unroll_factor=UNROLL):
        there = j < number
        one, at = _entry(lists_of, j, there)
        if KIND == TOPK:
            mass = tl.where(one >= t, tl.exp(one - centre), 0.0) * share
            part = mass
        else:
            mass, part = mass_of(one - centre, t, e, KIND)
            mass, part = tl.where(there, mass, 0.0) * share, tl.where(there, part, 0.0)
        some = part > 0.0
        v_mask = some[:, None] & (wide < value_width)[None, :]
        k_mask = some[:, None] & (narrow < width)[None, :]
        v = tl.load(values_of + at[:, None] * vn + wide[None, :], mask=v_mask, other=0.0).to(tl.float32)
        k = tl.load(keys_of + at[:, None] * kn + narrow[None, :], mask=k_mask, other=0.0).to(tl.float32)
        gain = tl.sum(up * v, 1)
        weight = mass
        if DROPOUT:
            kept = kept_at(drawn, row, at, keys, rate)
            gain = gain * kept
            weight = mass * kept
        changed = tl.where(some, part * (gain - middle) * scale, 0.0)
        of_query += changed[:, None] * k
        to = bh * keys + at
        tl.atomic_add(
            key_slope + to[:, None] * width + narrow[None, :], changed[:, None] * q, mask=k_mask, sem="relaxed"
        )
        tl.atomic_add(
            value_slope + to[:, None] * value_width + wide[None, :], weight[:, None] * up, mask=v_mask, sem="relaxed"
        )
    at = row[:, None] * gm + narrow[None, :]
    tl.store(
        query_slope + b * gb + h * gh + at, of_query.to(query_slope.dtype.element_ty),
        mask=rows[:, None] & (narrow < width)[None, :],
    )  # fmt: skip
