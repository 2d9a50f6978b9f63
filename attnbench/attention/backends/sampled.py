"""Products of queries with those keys alone that a list gives each of them, read where they lie (_sampled.cpp): sampled
dense-dense ones (SDDMM) for scores, sparse-dense ones (SpMM) for contexts."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbench.attention.cached import Sizes, rows_of
from attnbench.core import native
from attnbench.core.derivatives import once_differentiable

_SOURCE = Path(__file__).with_name("_sampled.cpp")

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Lists(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("query", ctypes.c_int64)
    )  # fmt: skip


def serves(*given: Float[Tensor, "B H N E"]) -> bool:
    """Whether `compare` and `blend` take these, which they bring to float32, and compiled code makes them."""
    if any(each.dim() != 4 or not each.is_cpu or each.dtype not in _TYPES or not each.numel() for each in given):
        return False
    return native.readable(*given) and native.load(_SOURCE) is not None


def compare(
    query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"], listed: Int[Tensor, "#B #H Q n"], first: int = 0
) -> tuple[Float[Tensor, "B H Q n"], Float[Tensor, "B H F K"]]:
    """`query_q . key_j` of the keys j that each query lists, and of all keys for so many of the first queries.

    Differentiable once; IndexError for a key that there is not.
    """
    return _Compare.apply(query.float(), keys.float(), listed, first)  # pyright: ignore[reportReturnType]


def blend(
    weights: Float[Tensor, "B H Q n"],
    of_all: Float[Tensor, "B H F K"],
    values: Float[Tensor, "B H K E"],
    listed: Int[Tensor, "#B #H Q n"],
) -> Float[Tensor, "B H Q E"]:
    """The sum of the values that each query lists, times their weights, but for the first F queries that of all values,
    times `of_all`. What is listed with weight 0 is not read. Differentiable once; IndexError for a value that there is
    not."""
    return _Blend.apply(weights.float(), of_all.float(), values.float(), listed)  # pyright: ignore[reportReturnType]


class _Compare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, listed: Tensor, first: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, keys, listed)
        with torch.autocast("cpu", enabled=False):
            return _compare(query, keys, listed), query[:, :, :first] @ keys.mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, listed = ctx.saved_tensors
        grad, of_all = (each.resolve_neg().contiguous() for each in grads)
        to_query = to_keys = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                to_query = _blend(grad, keys, listed)
                to_query[:, :, : of_all.shape[2]] += of_all @ keys
            if ctx.needs_input_grad[1]:
                to_keys = _spread(grad, query, listed, keys)
                _add_of_all(to_keys, of_all, query)
        return to_query, to_keys, None, None


class _Blend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, of_all: Tensor, values: Tensor, listed: Tensor) -> Tensor:
        weights = weights.contiguous()
        ctx.save_for_backward(weights, of_all, values, listed)
        out = _blend(weights, values, listed)
        with torch.autocast("cpu", enabled=False):
            out[:, :, : of_all.shape[2]] = of_all @ values
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, of_all, values, listed = ctx.saved_tensors
        first, grad = of_all.shape[2], grads[0].resolve_neg()
        to_weights = to_all = to_values = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                to_weights = _compare(grad, values, listed)
                to_weights[:, :, :first] = 0
            if ctx.needs_input_grad[1]:
                to_all = grad[:, :, :first] @ values.mT
            if ctx.needs_input_grad[2]:
                to_values = _spread(weights[:, :, first:], grad[:, :, first:], listed[:, :, first:], values)
                _add_of_all(to_values, of_all, grad)
        return to_weights, to_all, to_values, None


def _compare(query: Tensor, keys: Tensor, listed: Tensor) -> Float[Tensor, "B H Q n"]:
    scores = query.new_empty(*query.shape[:3], listed.shape[3])
    return _made("compare", query, keys, listed, scores, scores)


def _blend(weights: Tensor, values: Tensor, listed: Tensor) -> Float[Tensor, "B H Q E"]:
    out = weights.new_empty(*weights.shape[:3], values.shape[3])
    return _made("blend", out, values, listed, weights, out)


def _spread(weights: Tensor, given: Tensor, listed: Tensor, like: Tensor) -> Float[Tensor, "B H K E"]:
    """What each of the keys that are listed is given, added up."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    return _made("spread", given, out, listed, weights, out)


def _add_of_all(
    out: Float[Tensor, "B H K E"], of_all: Float[Tensor, "B H F K"], given: Float[Tensor, "B H Q E"]
) -> None:
    """Add what the first F queries give all keys."""
    if of_all.shape[2]:
        out.flatten(0, 1).baddbmm_(of_all.mT.flatten(0, 1), given[:, :, : of_all.shape[2]].flatten(0, 1))


def _made(what: str, asking: Tensor, held: Tensor, listed: Tensor, of_pairs: Tensor, made: Tensor) -> Tensor:
    """asking: a row a query. held: one a key. of_pairs: a number each, without gaps but between heads."""
    rows, heads, queries, width = asking.shape
    readable, count = listed.dtype == torch.int32 and listed.is_cpu, listed.shape[-1]
    fits = listed.shape[2:] == (queries, count) and of_pairs.shape == (rows, heads, queries, count)
    if not readable or not fits or held.shape != (rows, heads, held.shape[2], width):
        raise ValueError(
            f"lists {tuple(listed.shape)} of {listed.dtype} on {listed.device} do not fit {tuple(asking.shape)}, "
            f"{tuple(held.shape)} and {tuple(of_pairs.shape)}; give int32 on a processor"
        )
    asking, held, lists = _dense(asking), _dense(held), _dense(listed.expand(rows, heads, -1, -1))
    apart = of_pairs.stride(1 if heads > 1 else 0)
    failed = getattr(native.loaded(_SOURCE), f"attnbench_{what}_sampled")(
        *map(ctypes.byref, (rows_of(asking), rows_of(held), _Lists(lists.data_ptr(), *lists.stride()[:3]))),
        ctypes.c_int64(count), ctypes.byref(Sizes(rows * heads, heads, queries, held.shape[2], width)),
        native.at(of_pairs), ctypes.c_int64(apart), torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise IndexError(f"keys are listed beyond the {held.shape[2]} that there are")
    return made


def _dense(states: Tensor) -> Tensor:
    """With the numbers of a row side by side."""
    return states if states.stride(3) == 1 else states.contiguous()
