"""csoftmax and csparsemax on a GPU, in Triton (_bounded_kernels.py): what _bounded_rows.py is on a processor.

No row is left to others, and nothing waits. Scores 1e8 and more below the largest one count as if they lay there.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms._bounded_rows import KINDS, BoundedKind
from attnbench.core import native
from attnbench.core.kernels import compiles, programs, whole_rows

LONGEST = 1 << 12
"""The most keys that a program holds."""
_ELEMENTS = 1 << 9
"""Scores that a program holds at least."""
_A_WARP = 1 << 8
"""Scores of a warp."""


def serves(*given: Tensor) -> bool:
    """Whether these kernels take such scores and bounds."""
    fits = all(each.device.type == "cuda" and each.dtype == torch.float32 and each.numel() for each in given)
    return fits and not native.is_off() and given[0].shape[-1] <= LONGEST and compiles(given[0].device)


def solve(
    kind: BoundedKind,
    scores: Float[Tensor, "N K"],
    valid: Bool[Tensor, "N K"] | None,
    upper: Float[Tensor, "N K"],
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"], Bool[Tensor, "N"]]:
    """Weights of the valid keys of each row, none above its bound; the bounds, at most 2, and 0 at keys that get no
    weight; and whether these sum to less than 1. Not differentiable."""
    scores, upper = (each.detach().resolve_neg().contiguous() for each in (scores, upper))
    mask = scores if valid is None else valid.contiguous().view(torch.uint8)
    weights, bounds = torch.empty_like(scores), torch.empty_like(scores)
    short = torch.empty(len(scores), dtype=torch.uint8, device=scores.device)
    sizes = whole_rows(scores.shape[1], _ELEMENTS, _A_WARP)
    _kernels().solve[programs(len(scores), sizes)](
        scores, upper, mask, weights, bounds, short, *scores.shape,
        KIND=KINDS.index(kind), VALID=valid is not None, **sizes,
    )  # fmt: skip
    return weights, bounds, short.view(torch.bool)


def vjp(
    kind: BoundedKind,
    weights: Float[Tensor, "N K"],
    upper: Float[Tensor, "N K"],
    grad: Float[Tensor, "N K"],
    short: Bool[Tensor, "N"],
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N K"]]:
    """The gradients at scores and bounds. short: rows whose bounds sum to less than 1."""
    grad = grad.resolve_neg().contiguous()
    to_scores, to_upper = torch.empty_like(weights), torch.empty_like(weights)
    sizes = whole_rows(weights.shape[1], _ELEMENTS, _A_WARP)
    _kernels().vjp[programs(len(weights), sizes)](
        weights, upper, short.view(torch.uint8), grad, to_scores, to_upper, *weights.shape,
        KIND=KINDS.index(kind), **sizes,
    )  # fmt: skip
    return to_scores, to_upper


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("attnbench.attention.transforms._bounded_kernels")
