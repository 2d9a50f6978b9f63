"""Parts of the Triton kernels of fused.py: blocks of rows, of scores and of weights."""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.climb import ENTMAX15, LOG2E, SPARSEMAX, TOPK, mass_at, mass_of

PRECISION: tl.constexpr = tl.constexpr("tf32x3")
"""Of products in float32, to about its own accuracy; other types know one precision."""
ROUNDS: tl.constexpr = tl.constexpr(200)
"""Searches end long before; what has no root (NaN) ends here."""


@triton.jit
def rows_from(start, rows, row_stride, begin, width, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
              WHOLE: tl.constexpr = False):  # fmt: skip
    """Rows from `begin` on of a matrix in memory; 0 beyond its ends. WHOLE: none of them lies beyond."""
    row = begin + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    at = start + row[:, None] * row_stride + column[None, :]
    if WHOLE:
        return tl.load(at)
    there = (row < rows)[:, None] & (column < width)[None, :]
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def seen_by_all(first_query, keys, ahead, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many keys stand in whole blocks behind which every query of a block stands: none of them is beyond an end."""
    seen = keys
    if CAUSAL:
        seen = tl.maximum(tl.minimum(keys, first_query + ahead + 1), 0)
    return seen // BLOCK_N * BLOCK_N


@triton.jit
def alive_in(valid, rows, first_key, first_query, keys, ahead, CAUSAL: tl.constexpr, VALID: tl.constexpr,
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
def scores_of(q, k, alive, scale):
    """-inf where a key is not looked at."""
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    return tl.where(alive, products * scale, float("-inf"))


@triton.jit
def scores_at(q, k, valid, rows, first_key, first_query, keys, ahead, scale, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
              VALID: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The scores of a block of keys. EDGE: an end may lie in it; else all queries stand behind it (seen_by_all)."""
    if EDGE:
        return scores_of(
            q, k, alive_in(valid, rows, first_key, first_query, keys, ahead, CAUSAL, VALID, BLOCK_M, BLOCK_N), scale
        )
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if VALID:
        s = tl.where((tl.load(valid + first_key + tl.arange(0, BLOCK_N)) != 0)[None, :], s, float("-inf"))
    return s


@triton.jit
def factor_of(scale, e, KIND: tl.constexpr):
    """What products are multiplied by, before `shift_of` is added; scores, for a scale of 1."""
    return scale * LOG2E if KIND == TOPK else scale * e


@triton.jit
def shift_of(t, centre, e, KIND: tl.constexpr):
    """What the weights of a row are computed from, beside its products, in one step, for gradients. Its rounding is
    that of scores: of those beyond 1e6 weights lose digits, of those beyond 1e7 all."""
    if KIND == TOPK:
        return -centre * LOG2E
    below = -e * (centre + t)
    return 1.0 + below if KIND == SPARSEMAX or KIND == ENTMAX15 else below  # noqa: SIM109 - which Triton cannot read


@triton.jit
def weights_at(s, t, shift, factor, e, KIND: tl.constexpr):
    """Weights, but for what a row's are divided by, and the part of them that the gradient goes through. s: products,
    or scores, by their factor. t: the least product that top-k keeps; the others have no use for it. NaN stays NaN."""
    if KIND == TOPK:
        mass = tl.where(s < t, 0.0, tl.exp2(s * factor + shift))
        part = mass
    else:
        mass, part = mass_at(s * factor + shift, e, KIND)
    return mass, part


@triton.jit
def sums_of(d, t, e, KIND: tl.constexpr):
    """Of the weights of each row, and of their parts."""
    mass, part = mass_of(d, t[:, None], e, KIND)
    return tl.sum(mass, 1), tl.sum(part, 1)


@triton.jit
def halfway(left, least):
    """Halfway from the best key that is left out to the least that is not, so that a score that is rounded otherwise
    falls on the same side."""
    middle = left + (least - left) * 0.5
    return tl.where(left == float("-inf"), left, tl.where(middle > left, middle, least))


@triton.jit
def between(left, least, scale):
    """The same of products, by their scores: `left` itself, where those of the two are equal."""
    return tl.where(left * scale < least * scale, halfway(left, least), left)


@triton.jit
def kept_of_rows(threshold, most, inverse, place, there):
    """What forward kept of each row."""
    t = tl.load(threshold + place, mask=there, other=0.0)
    centre = tl.load(most + place, mask=there, other=0.0)
    share = tl.load(inverse + place, mask=there, other=1.0)
    return t, centre, share


@triton.jit
def mean_of(up, slope, row_stride, mean, row, place, there, value_width, VALUE_WIDTH: tl.constexpr):
    """Of the gradient of each row's weights, under the part that it goes through; kept in `mean`."""
    column = tl.arange(0, VALUE_WIDTH)
    inside = there[:, None] & (column < value_width)[None, :]
    of_row = tl.load(slope + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    middle = tl.sum(up.to(tl.float32) * of_row, 1)
    tl.store(mean + place, middle, mask=there)
    return middle


@triton.jit
def store_rows(
    out, out_stride, slope, threshold, most, inverse, row, place, rows, context, through, mass_sum, part_sum, centre, t,
    value_width, KIND: tl.constexpr, GRADIENT: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Contexts, and what is kept of each row for backward."""
    column = tl.arange(0, VALUE_WIDTH)
    there = rows[:, None] & (column < value_width)[None, :]
    share = 1.0 / tl.where(mass_sum == 0.0, 1.0, mass_sum)
    at = row[:, None] * out_stride + column[None, :]
    tl.store(out + at, (context * share[:, None]).to(out.dtype.element_ty), mask=there)
    if GRADIENT:
        if KIND != TOPK:
            held = 1.0 / tl.where(part_sum == 0.0, 1.0, part_sum)
            tl.store(slope + row[:, None] * value_width + column[None, :], through * held[:, None], mask=there)
        tl.store(threshold + place, t, mask=rows)
        tl.store(most + place, centre, mask=rows)
        tl.store(inverse + place, share, mask=rows)
