"""Nested NamedTuples of tensors: pick and repeat rows of dimension 0, as beams do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

X = TypeVar("X")


class Shared:
    """What all rows of a tree share, whichever of them are picked."""


def map_batch(function: Callable[[Tensor], Tensor], tree: X) -> X:
    """`function` of every tensor with a batch dimension; all rows share numbers, None, 0-dim tensors and what is
    Shared."""
    return _map(function, tree)


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value) if value.dim() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(function, item) for item in value)
    if value is None or isinstance(value, (int, float, str, Shared)):
        return value
    raise TypeError(f"a tree holds tensors, numbers, None and tuples of them, not {type(value).__name__}")


def closed_up(stay: Bool[Tensor, "B"]) -> Int[Tensor, "B2"]:
    """The rows that stay, in an order for `select_batch` in which few move: from the end into gaps."""
    rows = stay.nonzero().squeeze(1)
    if len(rows) == len(stay):
        return rows
    order = torch.arange(len(rows), device=rows.device)
    order[~stay[: len(rows)]] = rows[rows >= len(rows)]
    return order


def select_batch(tree: X, index: Int[Tensor, "B2"]) -> X:
    """Row `index[i]` of every tensor becomes its row i."""
    return map_batch(lambda tensor: tensor.index_select(0, index), tree)


def expand_batch(tree: X, times: int) -> X:
    """B rows become B * times, the copies of a row adjacent."""
    return map_batch(lambda tensor: torch.repeat_interleave(tensor, times, 0), tree)
