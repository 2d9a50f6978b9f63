"""A few queries a row, as in a step of decoding: their products with a cache, read where it lies (_few.cpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.attention.transforms import _rows
from attnbench.attention.transforms._entmax import SOFTMAX_BELOW
from attnbench.attention.transforms._simplex import check_mask
from attnbench.attention.transforms.base import Fused
from attnbench.core import native
from attnbench.core.derivatives import once_differentiable
from attnbench.core.gathered import add_product, gatherer

_SOURCE = Path(__file__).with_name("_few.cpp")
MOST = 10
"""Queries a row; with more of them matrix products are as fast."""
_LEAST = 1 << 16
"""Numbers in what is held; with fewer the call itself is what takes the time, and torch's takes less."""


class Rows(ctypes.Structure):
    """Queries, keys, values or contexts as compiled code reads them, where `_few.hpp` is included."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("position", ctypes.c_int64)
    )  # fmt: skip


class Listed(ctypes.Structure):
    """Keys of each row as compiled code reads them, where `_few.hpp` is included."""

    _fields_ = (("keys", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64))


ALL = Listed(None, 0, 0)
"""Where no keys are listed."""


class Sizes(ctypes.Structure):
    """Of what compiled code multiplies, where `_few.hpp` is included."""

    _fields_ = (
        ("rows", ctypes.c_int64), ("heads", ctypes.c_int64), ("queries", ctypes.c_int64), ("keys", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )  # fmt: skip


class _Attention(ctypes.Structure):
    _fields_ = (
        ("query", Rows), ("keys", Rows), ("values", Rows), ("out", Rows), ("sizes", Sizes),
        ("width", ctypes.c_int64), ("scale", ctypes.c_float), ("transform", _rows.Transform), ("valid", _rows.Strided),
        ("listed", Listed), ("forward", ctypes.c_void_p), ("scores", ctypes.c_void_p), ("weights", ctypes.c_void_p),
    )  # fmt: skip


def compare(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    """`query @ keys^T`. Differentiable once where compiled code serves: RuntimeError for a second derivative."""
    if not _serves(query, keys) or query.shape[3] != keys.shape[3]:
        return query @ keys.transpose(-2, -1)
    if _grows(query, keys):
        return _Compare.apply(query, keys)  # pyright: ignore[reportReturnType]
    return _compare(query, keys)


def _compare(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    out, query = query.new_empty(*query.shape[:-1], keys.shape[-2]), _dense(query)
    native.loaded(_SOURCE).attnbench_compare(
        *map(ctypes.byref, (rows_of(query), rows_of(keys), _sizes(query, keys))), ctypes.c_float(1), native.at(out),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def blend(weights: Float[Tensor, "B H Q K"], values: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q E"]:
    """`weights @ values`; where a row has one query, a value of weight 0 adds nothing to it, whatever it holds.
    Differentiable once where compiled code serves: RuntimeError for a second derivative."""
    if not _serves(weights, values) or weights.shape[3] != values.shape[2]:
        return weights @ values
    if _grows(weights, values):
        return _Blend.apply(weights, values)  # pyright: ignore[reportReturnType]
    return _blend(weights, values)


def _blend(weights: Float[Tensor, "B H Q K"], values: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q E"]:
    out, weights = weights.new_empty(*weights.shape[:-1], values.shape[-1]), weights.contiguous()
    native.loaded(_SOURCE).attnbench_blend(
        native.at(weights), *map(ctypes.byref, (rows_of(values), _sizes(weights, values), rows_of(out))),
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


def serves(query: Tensor, keys: Tensor, values: Tensor, transform: Fused) -> bool:
    """Whether `attend` takes these."""
    if _grows(query, keys, values):
        return False
    fits = _fits(query, keys) and _fits(query, values) and query.shape[3] == keys.shape[3]
    return fits and keys.shape[2] == values.shape[2] and _rows.serves(query) and knows(transform)


def knows(transform: Fused) -> bool:
    """Whether its weights are made by compiled code, where there is any, since no gradient is asked of them."""
    excess = transform.excess
    if not isinstance(excess, Tensor):
        return True
    if torch.is_grad_enabled() and excess.requires_grad:
        return False
    return bool((excess > SOFTMAX_BELOW).all())  # NaN is not above it


def attend(
    query: Float[Tensor, "B H Q E"],
    keys: Float[Tensor, "B H K E"],
    values: Float[Tensor, "B H K E2"],
    *,
    scale: float,
    transform: Fused,
    valid: Bool[Tensor, "#B #H #Q n"] | None = None,
    listed: Int[Tensor, "#B #H n"] | None = None,
) -> Float[Tensor, "B H Q E2"]:
    """Context of every query over all valid keys, in one call; its heads lie side by side.

    listed: the keys that are there, others are not read; left out: all of them. Masked values must be finite. Not
    differentiable. Raises IndexError for listed keys that there are not, ValueError for lists that do not fit.
    """
    query, (rows, heads, queries, _) = _dense(query), query.shape
    listed = None if listed is None else _required(listed, rows, heads, keys.shape[2])
    count = keys.shape[2] if listed is None else listed.shape[2]
    scores = query.new_empty(rows, heads, queries, count)
    weights, out = torch.empty_like(scores), query.new_empty(rows, queries, heads, values.shape[3]).transpose(1, 2)
    check_mask("valid", valid, scores)
    known, _held = _rows.read(transform, scores)
    marks = _rows.spread(valid, scores)
    given = _Attention(
        rows_of(query), rows_of(keys), rows_of(values), rows_of(out), _sizes(query, keys, count), values.shape[3],
        scale, known, _rows.strided(marks), listed_of(listed), _rows.address(), scores.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    _rows.check(native.loaded(_SOURCE).attnbench_attend(ctypes.byref(given), torch.get_num_threads()), scores)
    return out


def compiled() -> bool:
    """Whether there is compiled code for `attend`."""
    return native.load(_SOURCE) is not None and _rows.compiled()


def address() -> ctypes.c_void_p:
    """Where the compiled code of `attend` lies, for other compiled code; only where it is `compiled`."""
    return ctypes.cast(native.loaded(_SOURCE).attnbench_attend, ctypes.c_void_p)


def _serves(asking: Tensor, held: Tensor) -> bool:
    most = 1 if _grows(asking, held) else MOST
    return held.numel() >= _LEAST and asking.dim() == 4 and asking.shape[2] <= most and _fits(asking, held)


def _fits(asking: Tensor, held: Tensor) -> bool:
    if asking.dim() != 4 or not 1 <= asking.shape[2] <= MOST or asking.shape[:2] != held.shape[:2]:
        return False
    if asking.device.type != "cpu" or not asking.dtype == held.dtype == torch.float32 or held.stride(3) != 1:
        return False
    return held.numel() > 0 and native.readable(asking, held) and native.load(_SOURCE) is not None


def _grows(*given: Tensor) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in given)


def _required(listed: Tensor, rows: int, heads: int, keys: int) -> Int[Tensor, "#B #H n"]:
    """Lists that compiled code can read."""
    fits = listed.dim() == 3 and listed.shape[0] in (1, rows) and listed.shape[1] in (1, heads)
    if not fits or listed.dtype != torch.int64 or not listed.is_cpu:
        raise ValueError(
            f"lists {tuple(listed.shape)} of {listed.dtype} do not fit {rows} rows of {heads} heads; give int64 on a "
            "processor"
        )
    if listed.numel() and not 0 <= int(listed.min()) <= int(listed.max()) < keys:
        raise IndexError(f"keys are listed beyond the {keys} that there are")
    return listed.contiguous()


def _dense(query: Float[Tensor, "B H Q E"]) -> Float[Tensor, "B H Q E"]:
    """With the numbers of a query side by side."""
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


def _sizes(asking: Tensor, held: Float[Tensor, "B H K E"], count: int | None = None) -> Sizes:
    """count: of keys, where not all are meant."""
    rows, heads, keys, width = held.shape
    return Sizes(rows * heads, heads, asking.shape[2], keys if count is None else count, width)
