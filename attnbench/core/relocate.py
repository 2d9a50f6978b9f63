"""Rows of a tensor to other rows, in place: what a beam search does to its caches at every step.

Compiled (_relocate.cpp) each row is read and written once; with torch, twice.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_relocate.cpp")


class _Held(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64), ("position", ctypes.c_int64),
        ("heads", ctypes.c_int64), ("positions", ctypes.c_int64), ("width", ctypes.c_int64),
    )  # fmt: skip


def relocate(held: Shaped[Tensor, "R H K E"], into: Int[Tensor, "n"], source: Int[Tensor, "n"]) -> None:
    """`held[into[i]]` becomes what `held[source[i]]` was before; no row of `into` comes twice."""
    if len(into) != len(source):
        raise ValueError(f"{len(source)} rows cannot go to {len(into)}")
    if not _serves(held, into, source) or (library := native.load(_SOURCE)) is None:
        held.index_copy_(0, into, held.index_select(0, source))
        return
    if len(into) and (
        min(int(into.min()), int(source.min())) < 0 or max(int(into.max()), int(source.max())) >= len(held)
    ):
        raise IndexError(f"rows beyond the {len(held)} that there are")
    size = held.element_size()
    row, head, position, _ = (stride * size for stride in held.stride())
    shape = _Held(held.data_ptr(), row, head, position, held.shape[1], held.shape[2], held.shape[3] * size)
    into, source = into.contiguous(), source.contiguous()
    move: Any = library.attnbench_relocate
    move(
        ctypes.byref(shape), native.at(into), native.at(source), ctypes.c_int64(len(into)),
        torch.get_num_threads(),
    )  # fmt: skip


def _serves(held: Tensor, *rows: Tensor) -> bool:
    if any(each.dtype != torch.int64 or each.dim() != 1 or not native.readable(each) for each in rows):
        return False
    return held.device.type == "cpu" and held.stride(3) == 1 and held.numel() > 0 and native.readable(held)
