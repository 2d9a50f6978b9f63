"""Dropout in the Triton kernels of fused.py: which weights are kept, drawn anew wherever it is asked.

A generator as Triton has it (Philox, ten rounds) would take most of a kernel's time. Here it draws one key for each
head; what stands at a place is that key and the place's number, mixed by three multiplications.
"""

# The parameters of kernels are written as Triton reads them: `tl.constexpr` is decided when a kernel is compiled.
# pyright: basic, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def drawn_for(seed, bh, DROPOUT: tl.constexpr):
    """The 64 bits that decide what is dropped of one head. seed: where it lies on the device, on which it is drawn for
    each call."""
    drawn = tl.zeros([], tl.uint64)
    if DROPOUT:
        one, two, _, _ = tl.randint4x(tl.load(seed), bh.to(tl.int32))
        drawn = (one.to(tl.uint64) << 32) | two.to(tl.uint64)
    return drawn


@triton.jit
def kept_in(drawn, first_query, first_key, keys, rate, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What dropout multiplies the weights of a block by; the same wherever it is asked for."""
    q = first_query + tl.arange(0, BLOCK_M)
    k = first_key + tl.arange(0, BLOCK_N)
    return kept_at(drawn, q[:, None], k[None, :], keys, rate)


@triton.jit
def kept_at(drawn, q, k, keys, rate):
    """kept_in, by places. Places are counted in a head's own steps, or heads could share their draws, in another order;
    the bits are mixed as in Wellons's lowbias32 (nullprogram.com/blog/2018/07/31), but for its end, which moves low
    bits alone: nothing depends on them here."""
    place = _plus(_times(q, keys), k).to(tl.uint32, bitcast=True)
    bits = _plus(_times(place, drawn.to(tl.uint32) | 1), (drawn >> 32).to(tl.uint32))
    bits = _times(bits ^ (bits >> 16), 0x7FEB352D)
    bits = _times(bits ^ (bits >> 15), 0x846CA68B)
    return tl.where(bits >= tl.cast(rate * 4294967296.0, tl.uint32), 1.0 / (1.0 - rate), 0.0)


@triton.jit
def _times(bits, other):
    """Of 32 bits, the lower 32; TRITON_DEBUG shall not take that for a fault."""
    return tl.core.mul(bits, other, sanitize_overflow=False)


@triton.jit
def _plus(bits, other):
    return tl.core.add(bits, other, sanitize_overflow=False)
