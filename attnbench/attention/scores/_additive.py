"""The compiled path of additive scores on processors (_additive.cpp): tanh units are made where they are summed, and
backward makes them again, so that none of the B*H*Q*K*A is held.

Without a compiler the torch operations of additive.py serve.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.core import native
from attnbench.core.derivatives import once_differentiable
from attnbench.core.gathered import gatherer, sum_of

_SOURCE = Path(__file__).with_name("_additive.cpp")


class _Sizes(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("heads", ctypes.c_int64), ("queries", ctypes.c_int64), ("keys", ctypes.c_int64),
        ("units", ctypes.c_int64),
    )  # fmt: skip


def serves(queries: Tensor, keys: Tensor, vector: Tensor) -> bool:
    """Whether the compiled path takes these: what broadcasts, or does not fit, is left to torch operations."""
    given = queries, keys, vector
    if any(each.device.type != "cpu" or each.dtype != torch.float32 or not each.numel() for each in given):
        return False
    if queries.dim() != 4 or keys.dim() != 4 or queries.shape[:2] != keys.shape[:2]:
        return False
    if queries.shape[3] != keys.shape[3] or vector.shape != (queries.shape[1], queries.shape[3]):
        return False
    return native.readable(*given) and native.load(_SOURCE) is not None


def units(
    queries: Float[Tensor, "B H Q A"], keys: Float[Tensor, "B H K A"], vector: Float[Tensor, "H A"]
) -> Float[Tensor, "B H Q K"]:
    """`sum_a v_a tanh(q_a + k_a)` of each query and key; only where it `serves`. Differentiable once."""
    return _Units.apply(queries, keys, vector)  # pyright: ignore[reportReturnType]


class _Units(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
        given = [each.contiguous() for each in (queries, keys, vector)]
        ctx.node = gatherer(keys)
        ctx.save_for_backward(*given)
        out = queries.new_empty(*queries.shape[:3], keys.shape[2])
        native.loaded(_SOURCE).attnbench_additive(
            _sizes(queries, keys), *map(native.at, (*given, out)), torch.get_num_threads()
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        queries, keys, vector = ctx.saved_tensors
        to_keys, of_keys = sum_of(ctx.node, keys)
        made = torch.zeros_like(queries), to_keys, queries.new_zeros(len(queries), *vector.shape)
        given = grads[0].resolve_neg().contiguous(), queries, keys, vector
        native.loaded(_SOURCE).attnbench_additive_backward(
            _sizes(queries, keys), *map(native.at, (*given, *made)), torch.get_num_threads()
        )
        return made[0], of_keys, made[2].sum(0)


def _sizes(queries: Tensor, keys: Tensor) -> Any:
    batch, heads, count, units = queries.shape
    return ctypes.byref(_Sizes(batch * heads, heads, count, keys.shape[2], units))
