"""A few queries a row, as in a step of decoding: their products with a cache, read where it lies (_few.cpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_few.cpp")
_MOST = 10
"""Queries a row; with more of them matrix products are as fast."""
_LEAST = 1 << 16
"""Numbers in what is held; with fewer the call itself is what takes the time, and torch's takes less."""


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("position", ctypes.c_int64)
    )  # fmt: skip


class _Shape(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("heads", ctypes.c_int64), ("queries", ctypes.c_int64), ("keys", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )  # fmt: skip


def compare(query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]:
    """`query @ keys^T`."""
    if not _serves(query, keys) or query.shape[3] != keys.shape[3]:
        return query @ keys.transpose(-2, -1)
    out = query.new_empty(*query.shape[:-1], keys.shape[-2])
    _call("compare", query.contiguous(), keys, out)
    return out


def blend(weights: Float[Tensor, "B H Q K"], values: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q E"]:
    """`weights @ values`; where a row has one query, a value of weight 0 adds nothing, whatever it holds."""
    if not _serves(weights, values) or weights.shape[3] != values.shape[2]:
        return weights @ values
    out = weights.new_empty(*weights.shape[:-1], values.shape[-1])
    _call("blend", weights.contiguous(), values, out)
    return out


def _serves(asking: Tensor, held: Tensor) -> bool:
    if (
        asking.dim() != 4
        or not 1 <= asking.shape[2] <= _MOST
        or held.numel() < _LEAST
        or asking.shape[:2] != held.shape[:2]
    ):
        return False
    if asking.device.type != "cpu" or not asking.dtype == held.dtype == torch.float32 or held.stride(3) != 1:
        return False
    grows = torch.is_grad_enabled() and (asking.requires_grad or held.requires_grad)
    return not grows and native.readable(asking, held) and native.load(_SOURCE) is not None


def _call(name: str, asking: Tensor, held: Tensor, out: Tensor) -> None:
    library: Any = native.load(_SOURCE)
    rows, heads, keys, width = held.shape
    function = getattr(library, f"attnbench_{name}")
    function(
        native.at(asking), ctypes.byref(_Rows(held.data_ptr(), *held.stride()[:3])),
        ctypes.byref(_Shape(rows * heads, heads, asking.shape[2], keys, width)), native.at(out),
        torch.get_num_threads(),
    )  # fmt: skip
