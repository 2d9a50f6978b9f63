"""A shuffle of [0, N) that needs no memory: a keyed bijection, any part of which can be asked for.

A Feistel network over two digits in mixed radix (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002):
each round adds a keyed hash of one digit to the other, which can be undone, so the whole is one-to-one;
what falls outside [0, N) is sent through again until it falls inside (cycle walking).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6


def _mix(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), a good hash of 64 bits."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Shuffle:
    """The permutation of range(size) named by `key` (any 63-bit number): the same on every machine."""

    def __init__(self, size: int, key: int) -> None:
        if size < 0:
            raise ValueError(f"size {size} is negative")
        self.size = size
        self._a = max(1, math.isqrt(max(size - 1, 0)) + 1)  # a * b >= size, both near its root
        self._b = max(1, -(-size // self._a))
        seeds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)
        self._keys = _mix(seeds, np.uint64(key % 2**64))

    def __call__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each index goes. Raises IndexError outside [0, size)."""
        if len(index) and (index.min() < 0 or index.max() >= self.size):
            raise IndexError(f"indices of a shuffle of {self.size} lie in [0, {self.size})")
        out = self._once(index.astype(np.uint64))
        outside = np.flatnonzero(out >= self.size)
        while len(outside):
            out[outside] = self._once(out[outside])
            outside = outside[out[outside] >= self.size]
        return out.astype(np.int64)

    def _once(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = x // b, x % b
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _mix(left, key) % b) % b
            else:
                left = (left + _mix(right, key) % a) % a
        return left * b + right
