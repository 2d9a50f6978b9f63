"""The transforms of rows on a GPU, in Triton (_row_kernels.py): each row is read and written once, and nothing waits.

What rowwise.py is on a processor, with the same interface.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms.base import SOFTMAX_BELOW, Fused
from attnbench.attention.transforms.gpu_kinds import EXCESS, KINDS, LEAST
from attnbench.attention.transforms.rowwise import shape_of, spread
from attnbench.core import native
from attnbench.core.kernels import compiles, programs, whole_rows

LONGEST = 1 << 14
"""The most keys that a program holds."""
_ELEMENTS = 1 << 10
"""Scores that a program holds at least."""
_A_WARP = 1 << 10
"""Scores of a warp."""


def serves(scores: Tensor) -> bool:
    """Whether these kernels take the scores."""
    if scores.device.type != "cuda" or scores.dtype != torch.float32 or not scores.numel() or native.is_off():
        return False
    return scores.shape[-1] <= LONGEST and compiles(scores.device)


def weigh(scores: Float[Tensor, "... K"], valid: Bool[Tensor, "..."] | None, fused: Fused) -> Float[Tensor, "... K"]:
    """Weights of the valid keys of each row, under the rules of base.py; not differentiable."""
    scores = scores.detach().resolve_neg().contiguous()
    out = torch.empty_like(scores)
    excess = _excess(fused, scores)
    rows, middle, inner, keys = shape_of(scores)
    marks, kept = (spread(each, scores) for each in (valid, fused.keep))
    sizes = whole_rows(keys, _ELEMENTS, _A_WARP)
    _kernels().weigh[programs(rows, sizes)](
        scores, _bytes(marks, scores), _bytes(kept, scores), excess, out,
        *_strides(marks), *_strides(kept), *excess.stride()[:3], rows, middle, inner, keys, fused.k,
        KIND=KINDS[fused.kind], VALID=marks is not None, KEEP=kept is not None,
        ALL=fused.kind == "softmax" or not 0 < fused.k < keys, **sizes,
    )  # fmt: skip
    return out


def vjp(
    grad: Float[Tensor, "... K"], weights: Float[Tensor, "... K"], fused: Fused, *, to_scores: bool = True,
    to_excess: bool = False,
) -> tuple[Float[Tensor, "... K"] | None, Float[Tensor, "... 1"] | None]:  # fmt: skip
    """The gradient at the scores, and that at alpha of each row."""
    grad, weights = grad.resolve_neg().contiguous(), weights.contiguous()
    out = torch.empty_like(weights)
    alphas = weights.new_empty((*weights.shape[:-1], 1)) if to_excess else None
    excess = _excess(fused, weights)
    rows, middle, inner, keys = shape_of(weights)
    sizes = whole_rows(keys, _ELEMENTS, _A_WARP)
    _kernels().vjp[programs(rows, sizes)](
        weights, grad, excess, out, out if alphas is None else alphas, *excess.stride()[:3], rows, middle, inner, keys,
        KIND=KINDS[fused.kind], LEARNED=to_excess, **sizes,
    )  # fmt: skip
    return out if to_scores else None, alphas


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("attnbench.attention.transforms._row_kernels")


def _excess(fused: Fused, like: Tensor) -> Float[Tensor, "O M I 1"]:
    given = fused.excess if fused.kind == "entmax" else EXCESS[fused.kind]
    if isinstance(given, Tensor):
        given = given.detach().to(like.dtype)
        given = torch.where(given <= SOFTMAX_BELOW, LEAST, given)
    else:
        given = _constant(max(given, LEAST), like.device)
    return spread(given, like)  # pyright: ignore[reportReturnType] - None of None alone


@functools.cache
def _constant(value: float, device: torch.device) -> Float[Tensor, "1"]:
    with torch.inference_mode(False):  # that a training after an evaluation may keep it
        return torch.full((1,), value, device=device)


def _bytes(given: Tensor | None, instead: Tensor) -> Tensor:
    """A mask as kernels read it; where there is none, any tensor stands for it."""
    return instead if given is None else given.view(torch.uint8)


def _strides(given: Tensor | None) -> tuple[int, int, int, int]:
    if given is None:
        return 0, 0, 0, 0
    outer, middle, inner, key = given.stride()
    return outer, middle, inner, key if given.shape[-1] > 1 else 0
