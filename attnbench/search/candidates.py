"""The likeliest next tokens of each row, in an order that depends on the row alone."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_candidates.cpp")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_BLOCK = 64
"""Columns a block; the largest of a row lie in the blocks of largest maximum, so few columns need ranking."""


def top_tokens(
    logits: Float[Tensor, "R V"], count: int, banned: Sequence[int] = ()
) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]]:
    """Log-probabilities and ids of the best C = min(count, V) tokens of each row, best first.

    Equal ones stand in the order of their ids. The log-softmax runs over all V in float32 (float64 for float64);
    banned tokens keep their part of the mass, come last and have -inf; so has a row that is not all numbers.
    """
    count = min(count, logits.shape[-1])
    if (found := _compiled(logits, count, banned)) is not None:
        return found
    return _by_torch(logits, count, banned)


def _by_torch(
    logits: Float[Tensor, "R V"], count: int, banned: Sequence[int]
) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]]:
    """The definition, on any device."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probs = torch.log_softmax(logits, dim=-1, dtype=wide)
    values, ids = _largest(log_probs, count + len(banned))  # enough, though the best be banned ones
    for token in banned:
        values = values.masked_fill(ids == token, -torch.inf)
    values = torch.where(values.isnan(), -torch.inf, values)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids.gather(-1, order[:, :count])


def _compiled(
    logits: Float[Tensor, "R V"], count: int, banned: Sequence[int]
) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]] | None:
    """The same by _candidates.cpp, rows that are not all numbers by torch; None where it does not serve."""
    if logits.device.type != "cpu" or logits.dtype not in _NAMES or not logits.numel() or not count:
        return None
    if not native.readable(logits) or (library := native.load(_SOURCE)) is None:
        return None
    logits = logits.contiguous()
    values, ids = (
        logits.new_empty(len(logits), count, dtype=torch.float32),
        torch.empty(len(logits), count, dtype=torch.int64, device=logits.device),
    )
    best: Any = getattr(library, f"attnbench_best_{_NAMES[logits.dtype]}")
    strange = best(
        native.at(logits), ctypes.c_int64(len(logits)), ctypes.c_int64(logits.shape[1]),
        (ctypes.c_int64 * len(banned))(*banned), ctypes.c_int64(len(banned)), ctypes.c_int64(count),
        native.at(values), native.at(ids), torch.get_num_threads(),
    )  # fmt: skip
    if strange:
        some = values[:, 0].isnan().nonzero().squeeze(1)
        values[some], ids[some] = _by_torch(logits[some], count, banned)
    return values, ids


def _largest(rows: Float[Tensor, "R V"], wanted: int) -> tuple[Float[Tensor, "R W"], Int[Tensor, "R W"]]:
    """The `wanted` largest of each row, all where there are fewer, by ascending ids; among equals the lowest ids."""
    width = rows.shape[-1]
    if wanted >= width:
        return rows, torch.arange(width, device=rows.device).expand_as(rows)
    values, ids = _ranked(rows, wanted + 1)
    edge = values[:, -1]
    torn = (values[:, -2] == edge) & (edge > -torch.inf)  # equals on both sides of the cut: which are in is chance
    ids = ids[:, :-1].sort(dim=-1).values
    if bool(torn.any()):
        some = torn.nonzero().squeeze(1)
        chosen = _first_largest(rows[some], edge[some], wanted)
        ids = ids.index_copy(0, some, chosen.nonzero()[:, 1].view(-1, wanted))
    return rows.gather(-1, ids), ids


def _ranked(rows: Float[Tensor, "R V"], wanted: int) -> tuple[Float[Tensor, "R W"], Int[Tensor, "R W"]]:
    """topk(wanted); on long rows only within the blocks of largest maximum, and in the columns left over."""
    blocks = rows.shape[-1] // _BLOCK
    if blocks < 2 * wanted:
        return rows.topk(wanted, dim=-1)
    whole = blocks * _BLOCK
    blocked = rows[:, :whole].unflatten(1, (blocks, _BLOCK))
    best = blocked.amax(-1).topk(wanted, dim=-1).indices[:, :, None]
    column = torch.arange(_BLOCK, device=rows.device)
    ids = (best * _BLOCK + column).flatten(1)
    values = blocked.gather(1, best.expand(-1, -1, _BLOCK)).flatten(1)
    if whole < rows.shape[-1]:
        rest = torch.arange(whole, rows.shape[-1], device=rows.device).expand(len(rows), -1)
        values, ids = torch.cat([values, rows[:, whole:]], 1), torch.cat([ids, rest], 1)
    values, order = values.topk(wanted, dim=-1)
    return values, ids.gather(-1, order)


def _first_largest(rows: Float[Tensor, "R V"], edge: Float[Tensor, "R"], wanted: int) -> Bool[Tensor, "R V"]:
    """True at the `wanted` largest of each row, whose smallest equals `edge`: of its equals the first."""
    above, level = rows > edge[:, None], rows == edge[:, None]
    room = wanted - above.sum(-1, keepdim=True)
    return above | (level & (level.cumsum(-1, dtype=torch.int32) <= room))
