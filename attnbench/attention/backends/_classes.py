"""The largest scores of classes of keys, and the threshold of each row that they alone would have (_peaks.py).

Keys at places equal modulo the width of a block are one class. What a row's weights go by is a few large scores, of
which seldom five lie in one class, so that the four largest of each class hold them all. From fewer keys a threshold
lies no higher: where they do not, a search goes on from it.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from attnbench.attention.backends._blocks import sums_of
from attnbench.attention.climb import base_of, goes_on, mass_of, step_of

STEPS: tl.constexpr = tl.constexpr(4)
"""Of Newton's method on the largest scores of classes alone, before the others join."""
TURNS: tl.constexpr = tl.constexpr(60)
"""At most, with all four; what has no root (NaN) ends here."""


@triton.jit
def taken(s, first, second, third, fourth):
    """The four largest of each class, with one score more of each."""
    rest = tl.minimum(first, s)
    first = tl.maximum(first, s)
    s = tl.minimum(second, rest)
    second = tl.maximum(second, rest)
    rest = tl.minimum(third, s)
    third = tl.maximum(third, s)
    return first, second, third, tl.maximum(fourth, rest)


@triton.jit
def taken_pair(s, other, first, second, third, fourth):
    """The same with two scores more of each class, in two comparisons less (a bitonic merge)."""
    more, less = tl.maximum(s, other), tl.minimum(s, other)
    third, fourth = tl.maximum(third, less), tl.maximum(fourth, more)
    more, less = tl.maximum(first, third), tl.minimum(first, third)
    s, other = tl.maximum(second, fourth), tl.minimum(second, fourth)
    return tl.maximum(more, s), tl.minimum(more, s), tl.maximum(less, other), tl.minimum(less, other)


@triton.jit
def kth_of(first, second, third, fourth, count, BLOCK_M: tl.constexpr):
    """The least of each row's `count` best (-inf: there are fewer), the best that is left, and whether both are
    sure: a fifth of a class would be below, and the two differ."""
    hidden = tl.max(fourth, 1)
    found = tl.zeros([BLOCK_M], tl.int32)
    least = tl.max(first, 1)
    for _ in range(count):
        best = tl.max(first, 1)
        going = found < count
        hit = first >= tl.where(going, best, float("inf"))[:, None]
        found += tl.sum(hit.to(tl.int32), 1)
        least = tl.where(going, best, least)
        first = tl.where(hit, second, first)
        second = tl.where(hit, third, second)
        third = tl.where(hit, fourth, third)
        fourth = tl.where(hit, float("-inf"), fourth)
    left = tl.max(first, 1)
    alone = (left < least) | (left == float("-inf"))
    return least, left, alone & ((hidden < least) | (hidden == float("-inf")))


@triton.jit
def root_of(first, second, third, fourth, centre, e, KIND: tl.constexpr, BLOCK_M: tl.constexpr):
    """The threshold of each row, below `centre`, and whether it is sure: a fifth of a class would have no weight."""
    hidden = tl.max(fourth, 1) - centre
    first, second = first - centre[:, None], second - centre[:, None]
    third, fourth = third - centre[:, None], fourth - centre[:, None]
    t = start_of(first, e, KIND, BLOCK_M)
    going = 1
    turns = 0
    while going > 0:
        mass, part = mass_of(first, t[:, None], e, KIND)
        more, rest = mass_of(second, t[:, None], e, KIND)
        mass, part = mass + more, part + rest
        more, rest = mass_of(third, t[:, None], e, KIND)
        mass, part = mass + more, part + rest
        more, rest = mass_of(fourth, t[:, None], e, KIND)
        part_sum = tl.sum(part + rest, 1)
        step = step_of(tl.sum(mass + more, 1), part_sum, e, KIND)
        t += step
        going = tl.max(goes_on(step, part_sum, t, KIND).to(tl.int32), 0)
        turns += 1
        going = tl.where(turns >= TURNS, 0, going)
    return t, base_of(hidden, t, e) == 0.0


@triton.jit
def start_of(d, e, KIND: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where the search of a row may begin, from the largest scores of classes, less the row's largest."""
    t = tl.zeros([BLOCK_M], tl.float32)
    for _ in range(STEPS):
        mass, part = sums_of(d, t, e, KIND)
        t += step_of(mass, part, e, KIND)
    return t
