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
    """Where N tokens stand in a padded batch of B rows of S positions, on a processor.

    at: their places in the rows laid end to end, P = B * S in all. token: the token of each place there, -1 where there
    is none. rows: B.
    """

    at: Int[Tensor, "N"]
    token: Int[Tensor, "P"]
    rows: int

    @classmethod
    def of(cls, valid: Bool[Tensor, "B S"]) -> Ragged | None:
        """None where nothing would be gained: without padding, and on a GPU, which answers no question at once."""
        if valid.device.type != "cpu" or not valid.numel():
            return None
        at = valid.flatten().nonzero()[:, 0]
        if len(at) == valid.numel():
            return None
        token = torch.full((valid.numel(),), -1, dtype=torch.int64, device=at.device)
        token[at] = torch.arange(len(at), device=at.device)
        return cls(at, token, len(valid))

    def pad(self, tokens: Shaped[Tensor, "N D"], heads: int = 1) -> Shaped[Tensor, "B H S E"]:
        """The tokens in their places, the width split over the heads; 0 in all others.

        Raises ValueError for another number of tokens, and for a width that cannot be split.
        """
        return self.pad_parts(tokens, heads, 1)[0]

    def pad_parts(self, tokens: Shaped[Tensor, "N D"], heads: int, parts: int) -> tuple[Tensor, ...]:
        """`pad` of each of so many equal parts of the width."""
        return _Pad.apply(tokens, self, heads, parts)  # pyright: ignore[reportReturnType]

    def take(self, padded: Shaped[Tensor, "B H S E"]) -> Shaped[Tensor, "N D"]:
        """The tokens from their places, heads side by side. Raises ValueError for another number of places."""
        return self.take_parts(padded)

    def take_parts(self, *padded: Shaped[Tensor, "B H S E"]) -> Shaped[Tensor, "N D"]:
        """`take` of each, side by side. Raises ValueError where they differ in shape, type or device."""
        return _Take.apply(self, *padded)  # pyright: ignore[reportReturnType]


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ragged: Ragged, heads: int, parts: int) -> tuple[Tensor, ...]:
        ctx.ragged = ragged
        if tokens.dim() != 2 or len(tokens) != len(ragged.at) or tokens.shape[1] % (heads * parts):
            raise ValueError(
                f"{len(ragged.at)} tokens stand in this batch, of a width that is a multiple of {heads * parts}; these "
                f"are {tuple(tokens.shape)}"
            )
        length, width = len(ragged.token) // ragged.rows, tokens.shape[1] // (heads * parts)
        padded = tuple(tokens.new_empty(ragged.rows, heads, length, width) for _ in range(parts))
        library = native.load(_SOURCE) if _serves(tokens) and tokens.stride(1) == 1 else None
        for part, out in zip(tokens.chunk(parts, 1), padded, strict=True):
            if library is None:
                place = (ragged.at // length, slice(None), ragged.at % length)
                out.zero_()[place] = part.unflatten(1, (heads, width))
            else:
                _call(library.attnbench_pad, *_address(part), native.at(ragged.token), ctypes.byref(_Padded.of(out)))
        return padded

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ragged.take_parts(*upstream), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ragged: Ragged, *padded: Tensor) -> Tensor:
        ctx.ragged, ctx.heads, ctx.parts = ragged, padded[0].shape[1], len(padded)
        length = len(ragged.token) // ragged.rows
        if len({(part.shape, part.dtype, part.device) for part in padded}) > 1:
            raise ValueError(f"these differ: {', '.join(f'{tuple(part.shape)} {part.dtype}' for part in padded)}")
        if padded[0].dim() != 4 or (padded[0].shape[0], padded[0].shape[2]) != (ragged.rows, length):
            raise ValueError(f"this batch has {ragged.rows} rows of {length}; given is {tuple(padded[0].shape)}")
        library = native.load(_SOURCE) if _serves(*padded) else None
        if library is None:
            place = (ragged.at // length, slice(None), ragged.at % length)
            return torch.cat([part[place].flatten(1) for part in padded], 1)
        tokens = padded[0].new_empty(len(ragged.at), len(padded) * ctx.heads * padded[0].shape[3])
        for part, out in zip(padded, tokens.chunk(len(padded), 1), strict=True):
            source = part if part.stride(3) == 1 else part.contiguous()
            count = ctypes.c_int64(len(ragged.at))
            _call(library.attnbench_take, ctypes.byref(_Padded.of(source)), native.at(ragged.at), count, *_address(out))
        return tokens

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.ragged.pad_parts(upstream[0], ctx.heads, ctx.parts)


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


def _serves(*given: Tensor) -> bool:
    """Whether the compiled path takes these; it gives the same."""
    return all(each.device.type == "cpu" for each in given) and native.readable(*given)


def _address(tokens: Tensor) -> tuple[Any, Any]:
    """Where the tokens begin, and the bytes from one to the next."""
    return native.at(tokens), ctypes.c_int64(tokens.stride(0) * tokens.element_size())


def _call(function: Any, *given: Any) -> None:
    function(*given, torch.get_num_threads())
