"""The compiled path of csoftmax and csparsemax on processors (_bounded_rows.cpp).

Without a compiler the torch operations of _bounded.py serve, as they do for rows that are out of the ordinary.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_bounded_rows.cpp")
_NAMES = {torch.float32: "float32", torch.float64: "float64"}
BoundedKind = Literal["csoftmax", "csparsemax"]
KINDS: tuple[BoundedKind, ...] = get_args(BoundedKind)
"""In the order in which compiled code counts them, on a processor and on a GPU."""


class Solved(NamedTuple):
    weights: Float[Tensor, "N K"]
    upper: Float[Tensor, "N K"]
    """At most 2; 0 at keys that get no weight."""
    left: Int[Tensor, "R"]
    """Rows that are not solved."""


def serves(*given: Tensor) -> bool:
    """Whether the compiled path takes these scores and bounds."""
    fits = all(each.device.type == "cpu" and each.dtype in _NAMES and each.numel() for each in given)
    return fits and native.readable(*given) and native.load(_SOURCE) is not None


def solve(
    kind: BoundedKind,
    scores: Float[Tensor, "N K"],
    valid: Bool[Tensor, "N K"] | None,
    upper: Float[Tensor, "N K"],
) -> Solved:
    """Weights of the valid keys of each row, none above its bound; not differentiable."""
    scores, upper = scores.contiguous(), upper.contiguous()
    valid = None if valid is None else valid.contiguous()
    weights, bounds = torch.empty_like(scores), torch.empty_like(scores)
    left = torch.empty(len(scores), dtype=torch.bool, device=scores.device)
    given, made = (scores, upper, valid), (weights, bounds, left)
    if _call(kind, "forward", given, made):
        raise MemoryError(f"no memory for rows of {scores.shape[-1]} keys")
    return Solved(weights, bounds, left.nonzero().squeeze(1))


def vjp(
    kind: BoundedKind,
    weights: Float[Tensor, "N K"],
    upper: Float[Tensor, "N K"],
    grad: Float[Tensor, "N K"],
    short: Bool[Tensor, "N"] | None,
    *,
    bounds_too: bool,
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"] | None] | None:
    """The gradients at scores and bounds; None where a weight is no number. short: rows whose bounds sum to less
    than 1."""
    grad = grad.resolve_neg().contiguous()
    to_scores, to_upper = torch.empty_like(weights), torch.empty_like(weights) if bounds_too else None
    strange = _call(kind, "backward", (weights, upper, grad, short), (to_scores, to_upper))
    return None if strange else (to_scores, to_upper)


def _call(kind: BoundedKind, way: str, given: tuple[Tensor | None, ...], made: tuple[Tensor | None, ...]) -> int:
    first: Any = given[0]
    function = getattr(native.loaded(_SOURCE), f"attnbench_{_NAMES[first.dtype]}_{way}")
    size = (ctypes.c_int64(each) for each in first.shape)
    return function(
        KINDS.index(kind), *(native.at(each) for each in given), *size, *(native.at(each) for each in made),
        torch.get_num_threads(),
    )  # fmt: skip
