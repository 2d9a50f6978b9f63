"""Attention of a few queries a row, as in a step of decoding, in one call (_few.cpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.attention import cached
from attnbench.attention.cached import Listed, Rows, Sizes, listed_of, rows_of, sizes_of
from attnbench.attention.transforms import rowwise
from attnbench.attention.transforms.base import SOFTMAX_BELOW, Fused, check_mask
from attnbench.core import native

_SOURCE = Path(__file__).with_name("_few.cpp")


class _Attention(ctypes.Structure):
    _fields_ = (
        ("query", Rows), ("keys", Rows), ("values", Rows), ("out", Rows), ("sizes", Sizes), ("width", ctypes.c_int64),
        ("scale", ctypes.c_float), ("transform", rowwise.Transform), ("valid", rowwise.Strided), ("listed", Listed),
        ("forward", ctypes.c_void_p), ("scores", ctypes.c_void_p), ("weights", ctypes.c_void_p),
    )  # fmt: skip


def serves(query: Tensor, keys: Tensor, values: Tensor, transform: Fused) -> bool:
    """Whether `attend` takes these."""
    if cached.grows(query, keys, values):
        return False
    if not cached.fits(query, keys) or not cached.fits(query, values) or query.shape[3] != keys.shape[3]:
        return False
    made = native.load(_SOURCE) is not None and rowwise.serves(query)
    return made and keys.shape[2] == values.shape[2] and knows(transform)


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
    query, (rows, heads, queries, _) = cached.side_by_side(query), query.shape
    listed = None if listed is None else _required(listed, rows, heads, keys.shape[2])
    count = keys.shape[2] if listed is None else listed.shape[2]
    scores = query.new_empty(rows, heads, queries, count)
    weights, out = torch.empty_like(scores), query.new_empty(rows, queries, heads, values.shape[3]).transpose(1, 2)
    check_mask("valid", valid, scores)
    known, _held = rowwise.read(transform, scores)
    marks = rowwise.spread(valid, scores)
    given = _Attention(
        rows_of(query), rows_of(keys), rows_of(values), rows_of(out), sizes_of(query, keys, count), values.shape[3],
        scale, known, rowwise.strided(marks), listed_of(listed), rowwise.address(), scores.data_ptr(),
        weights.data_ptr(),
    )  # fmt: skip
    rowwise.check(native.loaded(_SOURCE).attnbench_attend(ctypes.byref(given), torch.get_num_threads()), scores)
    return out


def compiled() -> bool:
    """Whether there is compiled code for `attend`."""
    return native.load(_SOURCE) is not None and rowwise.compiled()


def address() -> ctypes.c_void_p:
    """Where the compiled code of `attend` lies, for other compiled code; only where it is `compiled`."""
    return ctypes.cast(native.loaded(_SOURCE).attnbench_attend, ctypes.c_void_p)


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
