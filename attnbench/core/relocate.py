"""Rows of a tensor to other rows, in place: what a beam search does to its caches at every step.

Compiled (_relocate.cpp) each row is read and written once; with torch, twice.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
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


def relocate(all_held: Sequence[Shaped[Tensor, "R H K E"]], into: Int[Tensor, "n"], source: Int[Tensor, "n"]) -> None:
    """`held[into[i]]` of each becomes what `held[source[i]]` was before; no row of `into` comes twice."""
    if len(into) != len(source):
        raise ValueError(f"{len(source)} rows cannot go to {len(into)}")
    if not len(into) or not all_held:
        return
    served = _lists(into) and _lists(source) and all(map(_serves, all_held))
    library = native.load(_SOURCE) if served else None
    if library is None:
        for held in all_held:
            held.index_copy_(0, into, held.index_select(0, source))
        return
    named, into, source = torch.cat([into, source]), into.contiguous(), source.contiguous()
    rows = min(map(len, all_held))
    if int(named.min()) < 0 or int(named.max()) >= rows:
        raise IndexError(f"rows beyond the {rows} that there are")
    move: Any = library.attnbench_relocate
    for held in all_held:
        size = held.element_size()
        row, head, position, _ = (stride * size for stride in held.stride())
        shape = _Held(held.data_ptr(), row, head, position, held.shape[1], held.shape[2], held.shape[3] * size)
        move(
            ctypes.byref(shape), native.at(into), native.at(source), ctypes.c_int64(len(into)),
            torch.get_num_threads(),
        )  # fmt: skip
        if not held.is_inference():
            torch.autograd.graph.increment_version(held)  # or a backward pass would read what is no longer there


def narrowed(all_held: Sequence[Shaped[Tensor, "R ..."]], rows: Int[Tensor, "n"]) -> list[Shaped[Tensor, "n ..."]]:
    """`held[rows]` of each, with n no more than R: in place where that can be, so that only rows that move are read and
    written. What is passed in is spent."""
    into = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
    views = Counter(each.data_ptr() for each in {_view(each): each for each in all_held}.values())
    alone = [_is_writable(each) and views[each.data_ptr()] == 1 for each in all_held]
    places = {each.data_ptr(): each for each, own in zip(all_held, alone, strict=True) if own}  # one may be there twice
    copies = [None if own else each.index_select(0, rows) for each, own in zip(all_held, alone, strict=True)]
    relocate(list(places.values()), into, rows[into])
    return [each[: len(rows)] if copy is None else copy for each, copy in zip(all_held, copies, strict=True)]


def _view(held: Tensor) -> tuple[Any, ...]:
    return held.data_ptr(), held.shape, held.stride()


def _is_writable(held: Tensor) -> bool:
    return held.dim() == 4 and _lie_apart(held) and not (held.requires_grad and torch.is_grad_enabled())


def _lie_apart(held: Tensor) -> bool:
    return all(stride or size == 1 for size, stride in zip(held.shape, held.stride(), strict=True))


def _lists(rows: Tensor) -> bool:
    return rows.is_cpu and rows.dtype == torch.int64 and rows.dim() == 1 and native.readable(rows)


def _serves(held: Tensor) -> bool:
    if torch.is_grad_enabled() and held.requires_grad:
        return False
    fits = held.device.type == "cpu" and held.stride(3) == 1 and held.numel() > 0
    return fits and _lie_apart(held) and native.readable(held)
