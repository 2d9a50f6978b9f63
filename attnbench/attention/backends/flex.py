"""Patterns on a GPU by FlexAttention of torch, which skips the blocks of scores that hold no key of the pattern.

Inputs are filled up to whole blocks, so that few lengths are compiled. Softmax alone, without dropout on weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnbench.attention.backends import fused
from attnbench.attention.types import MaskMod
from attnbench.core.errors import MissingExtraError

BLOCK = 128
"""Positions on either side of a block of scores."""
COMPILED = 256
"""Patterns, types and kinds of length that may be compiled."""
NARROWEST = 16
"""Width of a head that it takes, at least."""
FROM = 512
"""Positions from which `auto` takes it on a GPU. There an H100 needs 0.22 to 0.39 of the definition's time in bfloat16,
forward with backward, one sequence without padding (experiments/speed/results/gpu-scaling); shorter passes are not
worth compiling for.
"""


def pays(query: Float[Tensor, "B H Q E"], keys: int, right_padded: bool) -> bool:
    """Whether `auto` sends a pass over so many keys here.

    right_padded: no key is masked but at the right end of rows, which could not be told of a mask without waiting for
    the GPU. And in half precision, in which it was timed.
    """
    length, width = query.shape[2:]
    full = length == keys >= FROM and right_padded
    fits = NARROWEST <= width <= fused.WIDEST and width.bit_count() == 1
    return full and fits and query.dtype in (torch.float16, torch.bfloat16) and fused.compiles(query.device)


def attend(
    query: Float[Tensor, "B H L E"],
    keys: Float[Tensor, "B H L E"],
    values: Float[Tensor, "B H L E2"],
    *,
    rule: MaskMod | None,
    scale: float,
    valid: Bool[Tensor, "B L"] | None = None,
) -> Float[Tensor, "B H L E2"]:
    """Context of every query of a full pass of self-attention, in the type of the values.

    rule: of a pattern that is not drawn. valid: padded on the right, as batches are. Raises MissingExtraError for a
    gradient without a CUDA device, where torch has none, and RuntimeError for another `valid`.
    """
    if not query.is_cuda and torch.is_grad_enabled():
        raise MissingExtraError("the backend 'flex' needs a CUDA device; drop `backend: flex`, or take --device cuda")
    length = query.shape[2]
    beyond = -length % BLOCK
    lengths = _lengths(query, valid) if valid is not None or beyond else None
    wide = functools.reduce(torch.promote_types, (each.dtype for each in (query, keys, values)))
    filled = [nn.functional.pad(each.to(wide), (0, 0, 0, beyond)).contiguous() for each in (query, keys, values)]

    def padding(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert lengths is not None  # a comparison: to look up each key would take many times as long
        return torch.where(k < lengths[b], score, -torch.inf)

    mask = None if rule is None else _blocks(rule, length + beyond, query.device)
    score_mod = None if lengths is None else padding
    context = _attention(query.is_cuda)(*filled, score_mod=score_mod, block_mask=mask, scale=scale)
    return context[:, :, :length].to(values.dtype)


def _lengths(query: Tensor, valid: Bool[Tensor, "B L"] | None) -> Int[Tensor, "B"]:
    rows, length = query.shape[0], query.shape[2]
    if valid is None:
        return torch.full((rows,), length, dtype=torch.int32, device=query.device)
    lengths = valid.sum(1, dtype=torch.int32)
    padded = torch.arange(length, device=valid.device) < lengths[:, None]
    torch._assert_async(  # pyright: ignore[reportPrivateImportUsage] - which waits for nothing
        (padded == valid).all(), "the backend 'flex' takes rows that are padded on the right alone"
    )
    return lengths


@functools.cache
def _attention(compiled: bool) -> Callable[..., Any]:
    if not compiled:
        return flex_attention
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
    # torch counts what it compiles of this function for all patterns together, and past the limit makes all scores
    setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), COMPILED))
    return torch.compile(flex_attention)


@functools.cache  # a record of an update may go on reading what is kept
def _blocks(rule: MaskMod, length: int, device: torch.device) -> Any:
    with torch.inference_mode(False):  # that a training after an evaluation may keep it
        return create_block_mask(rule, None, None, length, length, device=str(device), BLOCK_SIZE=BLOCK)
