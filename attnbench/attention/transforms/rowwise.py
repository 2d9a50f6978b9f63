"""The compiled path of the transforms on processors (_rowwise.cpp): each row is read and written once.

Measured against the same in torch operations by `attnbench speed ops`. Without a compiler those serve.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from attnbench.attention.transforms.base import Fused, FusedKind
from attnbench.core import native

_SOURCE = Path(__file__).with_name("_rowwise.cpp")
_KINDS: tuple[FusedKind, ...] = get_args(FusedKind)
_NAMES = {torch.float32: "float32", torch.float64: "float64"}


class Strided(ctypes.Structure):
    """What `strided` tells of a tensor, where `_transform.hpp` is included."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("outer", ctypes.c_int64), ("middle", ctypes.c_int64), ("inner", ctypes.c_int64),
        ("key", ctypes.c_int64),
    )  # fmt: skip


class _Shape(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("middle", ctypes.c_int64), ("inner", ctypes.c_int64), ("keys", ctypes.c_int64)
    )  # fmt: skip


class Transform(ctypes.Structure):
    """A transform as compiled code reads it, where `_transform.hpp` is included."""

    _fields_ = (
        ("kind", ctypes.c_int), ("k", ctypes.c_int64), ("keep", Strided), ("excess", Strided), ("part", ctypes.c_int64),
        ("whole", ctypes.c_int64), ("least", ctypes.c_int64), ("first", ctypes.c_int),
    )  # fmt: skip


NOTHING = Strided(None, 0, 0, 0, 0)
"""Where compiled code is given nothing of that kind."""


def serves(scores: Tensor) -> bool:
    """Whether the compiled path takes these scores."""
    if scores.device.type != "cpu" or scores.dtype not in _NAMES or scores.numel() == 0:
        return False
    return native.readable(scores) and compiled()


def compiled() -> bool:
    """Whether there is compiled code for transforms."""
    return native.load(_SOURCE) is not None


def weigh(scores: Float[Tensor, "... K"], valid: Bool[Tensor, "..."] | None, fused: Fused) -> Float[Tensor, "... K"]:
    """Weights of the valid keys of each row, under the rules of base.py; not differentiable."""
    scores = scores.detach().contiguous()
    out = torch.empty_like(scores)
    transform, _held = read(fused, scores)
    marks = spread(valid, scores)
    failed = _call(
        scores.dtype, "forward",
        ctypes.byref(transform), native.at(scores), ctypes.byref(strided(marks)), _shape(scores), native.at(out),
        torch.get_num_threads(),
    )  # fmt: skip
    check(failed, scores)
    return out


def read(fused: Fused, like: Float[Tensor, "... K"]) -> tuple[Transform, list[Tensor | None]]:
    """The transform as compiled code reads it for scores like these, and what must live as long."""
    keep, excess = spread(fused.keep, like), _excess(fused.excess, like) if fused.kind == "entmax" else None
    kind, share = _KINDS.index(fused.kind), fused.share or (0, 0, 0)
    return Transform(kind, fused.k, strided(keep), strided(excess), *share, fused.first), [keep, excess]


def address() -> ctypes.c_void_p:
    """Where the compiled forward pass of float32 lies, for other compiled code; only where it is `compiled`."""
    return ctypes.cast(native.loaded(_SOURCE).attnbench_float32_forward, ctypes.c_void_p)


def check(failed: int, scores: Float[Tensor, "... K"]) -> None:
    """Raise MemoryError where compiled code says that it has none."""
    if failed:
        raise MemoryError(f"no memory for rows of {scores.shape[-1]} keys")


def vjp(
    grad: Float[Tensor, "... K"], weights: Float[Tensor, "... K"], fused: Fused, *, to_scores: bool = True,
    to_excess: bool = False,
) -> tuple[Float[Tensor, "... K"] | None, Float[Tensor, "... 1"] | None]:  # fmt: skip
    """The gradient at the scores, and that at alpha of each row."""
    grad, weights = grad.resolve_neg().contiguous(), weights.contiguous()
    out = torch.empty_like(weights) if to_scores else None
    alphas = weights.new_empty((*weights.shape[:-1], 1)) if to_excess else None
    excess = _excess(fused.excess, weights) if fused.kind == "entmax" else None
    failed = _call(
        weights.dtype, "backward",
        _KINDS.index(fused.kind), native.at(weights), native.at(grad), ctypes.byref(strided(excess)),
        _shape(weights), native.at(out), native.at(alphas), torch.get_num_threads(),
    )  # fmt: skip
    check(failed, weights)
    return out, alphas


def _call(dtype: torch.dtype, direction: str, *arguments: Any) -> int:
    library = native.loaded(_SOURCE)  # `serves` said so, if only of the forward pass
    return getattr(library, f"attnbench_{_NAMES[dtype]}_{direction}")(*arguments)


def _dims(shape: torch.Size) -> tuple[int, int, int, int]:
    """The shape in four dimensions: what stands before the last three is one."""
    padded = (1, 1, 1, *shape)
    return math.prod(padded[:-3]), *padded[-3:]  # pyright: ignore[reportReturnType]


def shape_of(like: Tensor) -> tuple[int, int, int, int]:
    """rows, M, I and K of a tensor that is seen as [O, M, I, K]; rows are O M I."""
    outer, middle, inner, keys = _dims(like.shape)
    return outer * middle * inner, middle, inner, keys


def _shape(like: Tensor) -> Any:
    return ctypes.byref(_Shape(*shape_of(like)))


def spread(given: Shaped[Tensor, "..."] | None, like: Float[Tensor, "... K"]) -> Shaped[Tensor, "O M I #K"] | None:
    """A mask or a number a row over four dimensions, with stride 0 where it is broadcast, if views can do it."""
    if given is None:
        return None
    last = given.shape[-1] if given.dim() else 1
    found = given.expand(*like.shape[:-1], last).reshape(*_dims(like.shape)[:-1], last)
    return found if last == 1 or found.stride(-1) == 1 else found.contiguous()


def _excess(excess: float | Tensor, like: Tensor) -> Tensor | None:
    if not isinstance(excess, Tensor):
        excess = like.new_full((1,), excess)
    return spread(excess.detach().to(like.dtype), like)


def strided(given: Shaped[Tensor, "O M I #K"] | None) -> Strided:
    """As compiled code reads it while it lives; a last dimension of 1 is broadcast."""
    if given is None:
        return NOTHING
    strides = (*given.stride()[:-1], given.stride(-1) if given.shape[-1] > 1 else 0)
    return Strided(given.data_ptr(), *strides)
