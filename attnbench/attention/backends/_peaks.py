"""The forward Triton kernel of fused.py for rows whose weights lie on few keys.

A program takes one block of queries of one head. It goes over the keys twice: for the four largest scores of each class
of keys (_classes.py), from which it has the thresholds, and to mix the values. A row in which other keys have a weight,
too, is told by the sum of its weights, and left to the kernel of _forward.py (`found` > 1).
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import drawn_for, halfway, rows_from, seen_by_all, store_rows
from attnbench.attention.backends._classes import kth_of, root_of
from attnbench.attention.backends._passes import largest_of, mixed_of
from attnbench.attention.transforms._climb import LOG2E, SETTLED, TOPK, step_of

TOLD: tl.constexpr = tl.constexpr(2e-6)
"""Of a sum, what a difference must have to be told from how it was added up."""


@triton.jit
def peaks(
    query, key, value, out, slope, threshold, most, inverse, valid, excess, found, crowded,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, ob, oh, om, valid_b,
    heads, queries, keys, width, value_width, ahead, scale, count, seed, rate,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, VALID: tl.constexpr, DROPOUT: tl.constexpr, GRADIENT: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLASSES: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """What `forward` makes of one block of queries. found: of each row, 2 where other keys have a weight, else 0;
    crowded: of each head, whether there is such a row. CLASSES: how many classes of keys there are."""
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

    one, two, three, four = largest_of(
        q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end,
        CAUSAL, VALID, WIDTH, BLOCK_M, CLASSES, FULL,
    )  # fmt: skip
    m = tl.max(one, 1)
    centre = tl.where(m == float("-inf"), 0.0, m)  # a row without a key
    if KIND == TOPK:
        least, left, expected = kth_of(one, two, three, four, centre, count, BLOCK_M)
        # less than half of the least weight, or of what can be told, is none
        slack = 0.5 * tl.exp2((least - centre) * LOG2E) + TOLD * expected
        t = halfway(left, least)
    else:
        t = root_of(one, two, three, four, centre, e, KIND, BLOCK_M)

    context, through, mass_sum, part_sum = mixed_of(
        q, keys_of, kn, valid_of, queries, first, keys, width, ahead, scale, whole, end, values_of, vn, value_width,
        centre, t, e, drawn_for(seed, bh, DROPOUT), rate,
        KIND, CAUSAL, VALID, DROPOUT, GRADIENT, WIDTH, VALUE_WIDTH, BLOCK_M, BLOCK_N, FULL,
    )  # fmt: skip
    if KIND == TOPK:  # noqa: SIM108 - as it is read
        more = mass_sum - expected > slack
    else:
        more = step_of(mass_sum, part_sum, e, KIND) > SETTLED * (1.0 + t)
    more = (rows & more).to(tl.int32)
    tl.store(found + place, 2 * more, mask=rows)
    if tl.max(more, 0) > 0:
        tl.atomic_max(crowded + bh, 1)
    store_rows(
        out + b * ob + h * oh, om, slope + bh * queries * value_width, threshold, most, inverse, row, place, rows,
        context, through, mass_sum, part_sum, centre, t, value_width, KIND, GRADIENT, True, VALUE_WIDTH,
    )  # fmt: skip
