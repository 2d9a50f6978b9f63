"""Batches without their padding: the tokens of all rows behind one another.

What works on each token alone (projections, feed-forward blocks, norms) then does no work for padding; attention, which
looks along rows, has them padded. Compiled (_ragged.cpp) a change from one form to the other is a single copy.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_ragged.cpp")


class Ragged(NamedTuple):
    """Where N tokens stand in a padded batch of B rows.

    at: their places in the rows laid end to end. token: the token of each place there, -1 where there is none.
    """

    at: Int[Tensor, "N"]
    token: Int[Tensor, "P"]
    rows: int

    @classmethod
    def of(cls, valid: Bool[Tensor, "B S"]) -> Ragged | None:
        """None where nothing would be gained: without padding, and off the processor, which would have to be waited
        for."""
        if valid.device.type != "cpu" or not valid.numel():
            return None
        at = valid.flatten().nonzero()[:, 0]
        if len(at) == valid.numel():
            return None
        token = torch.full((valid.numel(),), -1)
        token[at] = torch.arange(len(at))
        return cls(at, token, len(valid))

    def pad(self, tokens: Shaped[Tensor, "N D"], heads: int = 1) -> Shaped[Tensor, "B H S E"]:
        """The tokens in their places, the width split over the heads; 0 in all others."""
        return _Pad.apply(tokens, self, heads)  # pyright: ignore[reportReturnType]

    def take(self, padded: Shaped[Tensor, "B H S E"]) -> Shaped[Tensor, "N D"]:
        """The tokens from their places, heads side by side."""
        return _Take.apply(padded, self)  # pyright: ignore[reportReturnType]


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ragged: Ragged, heads: int) -> Tensor:
        ctx.ragged = ragged
        length, width = len(ragged.token) // ragged.rows, tokens.shape[1] // heads
        padded = tokens.new_empty(ragged.rows, heads, length, width)
        if native.readable(tokens) and tokens.stride(1) == 1 and (library := native.load(_SOURCE)) is not None:
            size = tokens.element_size()
            _call(
                library.attnbench_pad, native.at(tokens), ctypes.c_int64(tokens.stride(0) * size),
                native.at(ragged.token), ctypes.byref(_Padded.of(padded)),
            )  # fmt: skip
            return padded
        place = (ragged.at // length, slice(None), ragged.at % length)
        padded.zero_()[place] = tokens.unflatten(1, (heads, width))
        return padded

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ragged.take(upstream[0]), None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, ragged: Ragged) -> Tensor:
        ctx.ragged, ctx.heads = ragged, padded.shape[1]
        length = padded.shape[2]
        if native.readable(padded) and padded.stride(3) == 1 and (library := native.load(_SOURCE)) is not None:
            tokens = padded.new_empty(len(ragged.at), padded.shape[1] * padded.shape[3])
            _call(
                library.attnbench_take, ctypes.byref(_Padded.of(padded)), native.at(ragged.at),
                ctypes.c_int64(len(ragged.at)), native.at(tokens),
            )  # fmt: skip
            return tokens
        return padded[ragged.at // length, :, ragged.at % length].flatten(1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.ragged.pad(upstream[0], ctx.heads), None


class _Padded(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64), ("position", ctypes.c_int64),
        ("rows", ctypes.c_int64), ("heads", ctypes.c_int64), ("positions", ctypes.c_int64), ("width", ctypes.c_int64),
    )  # fmt: skip

    @classmethod
    def of(cls, padded: Tensor) -> _Padded:
        size = padded.element_size()
        row, head, position, _ = (stride * size for stride in padded.stride())
        rows, heads, positions, width = padded.shape
        return cls(padded.data_ptr(), row, head, position, rows, heads, positions, width * size)


def _call(function: Any, *given: Any) -> None:
    function(*given, torch.get_num_threads())
