"""Products of a few queries a row with a cache, as in a step of decoding, read where it lies (_cached.cpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbench.core import native
from attnbench.core.derivatives import once_differentiable
from attnbench.core.gathered import add_product, gatherer

_SOURCE = Path(__file__).with_name("_cached.cpp")
MOST = 10
"""Queries a row; with more of them matrix products are as fast."""
_LEAST = 1 << 16
"""Numbers in what is held; with fewer the call itself is what takes the time, and torch's takes less."""


class Rows(ctypes.Structure):
    """Queries, keys, values or contexts as compiled code reads them, where `_cached.hpp` is included."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("position", ctypes.c_int64)
    )  # fmt: skip


class Listed(ctypes.Structure):
    """Keys of each row as compiled code reads them, where `_cached.hpp` is included."""

    _fields_ = (("keys", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64))


ALL = Listed(None, 0, 0)
"""Where no keys are listed."""


class Sizes(ctypes.Structure):
    """Of what compiled code multiplies, where `_cached.hpp` is included."""

    _fields_ = (
        ("rows", ctypes.c_int64), ("heads", ctypes.c_int64), ("queries", ctypes.c_int64), ("keys", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )  # fmt: skip


def compare(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    """`query @ keys^T`. Differentiable once where compiled code serves: RuntimeError for a second derivative."""
    if not _serves(query, keys) or query.shape[3] != keys.shape[3]:
        return query @ keys.transpose(-2, -1)
    if grows(query, keys):
        return _Compare.apply(query, keys)  # pyright: ignore[reportReturnType]
    return _compare(query, keys)


def _compare(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    out, query = query.new_empty(*query.shape[:-1], keys.shape[-2]), side_by_side(query)
    native.loaded(_SOURCE).attnbench_compare(
        *map(ctypes.byref, (rows_of(query), rows_of(keys), sizes_of(query, keys))), ctypes.c_float(1), native.at(out),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def blend(weights: Float[Tensor, "B H Q K"], values: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q E"]:
    """`weights @ values`; where a row has one query, a value of weight 0 adds nothing to it, whatever it holds.
    Differentiable once where compiled code serves: RuntimeError for a second derivative."""
    if not _serves(weights, values) or weights.shape[3] != values.shape[2]:
        return weights @ values
    if grows(weights, values):
        return _Blend.apply(weights, values)  # pyright: ignore[reportReturnType]
    return _blend(weights, values)


def _blend(weights: Float[Tensor, "B H Q K"], values: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q E"]:
    out, weights = weights.new_empty(*weights.shape[:-1], values.shape[-1]), weights.contiguous()
    native.loaded(_SOURCE).attnbench_blend(
        native.at(weights), *map(ctypes.byref, (rows_of(values), sizes_of(weights, values), rows_of(out))),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor) -> Tensor:
        ctx.node = gatherer(keys)
        ctx.save_for_backward(query, keys)
        return _compare(query, keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys = ctx.saved_tensors
        grad = grads[0].resolve_neg()
        to_query = _blend(grad, keys) if ctx.needs_input_grad[0] else None
        return to_query, add_product(ctx.node, grad, query) if ctx.needs_input_grad[1] else None


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor) -> Tensor:
        ctx.node = gatherer(values)
        ctx.save_for_backward(weights, values)
        return _blend(weights, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, values = ctx.saved_tensors
        grad = grads[0].resolve_neg()
        to_weights = _compare(grad, values) if ctx.needs_input_grad[0] else None
        return to_weights, add_product(ctx.node, weights, grad) if ctx.needs_input_grad[1] else None


def grows(*given: Tensor) -> bool:
    """Whether a gradient is asked of one of them."""
    return torch.is_grad_enabled() and any(each.requires_grad for each in given)


def fits(asking: Tensor, held: Tensor) -> bool:
    """Whether compiled code, where there is any, reads these: float32 on a processor, a few queries for each row."""
    if asking.dim() != 4 or not 1 <= asking.shape[2] <= MOST or asking.shape[:2] != held.shape[:2]:
        return False
    if asking.device.type != "cpu" or not asking.dtype == held.dtype == torch.float32 or held.stride(3) != 1:
        return False
    return held.numel() > 0 and native.readable(asking, held)


def side_by_side(query: Float[Tensor, "B H Q E"]) -> Float[Tensor, "B H Q E"]:
    """With the numbers of each query side by side."""
    return query if query.stride(3) == 1 else query.contiguous()


def rows_of(states: Float[Tensor, "B H N E"]) -> Rows:
    """As compiled code reads them, while they live."""
    return Rows(states.data_ptr(), *states.stride()[:3])


def listed_of(keys: Int[Tensor, "#B #H n"] | None) -> Listed:
    """As compiled code reads them, while they live; they are contiguous."""
    if keys is None:
        return ALL
    rows, heads, count = keys.shape
    return Listed(keys.data_ptr(), heads * count if rows > 1 else 0, count if heads > 1 else 0)


def sizes_of(asking: Tensor, held: Float[Tensor, "B H K E"], count: int | None = None) -> Sizes:
    """count: of keys, where not all are meant."""
    rows, heads, keys, width = held.shape
    return Sizes(rows * heads, heads, asking.shape[2], keys if count is None else count, width)


def _serves(asking: Tensor, held: Tensor) -> bool:
    most = 1 if grows(asking, held) else MOST
    if held.numel() < _LEAST or asking.dim() != 4 or asking.shape[2] > most:
        return False
    return fits(asking, held) and native.load(_SOURCE) is not None
