"""Sparse attention in Triton: scores, weights and contexts in one kernel, which never writes a score (_kernels.py).

For softmax over the k best keys, sparsemax and alpha-entmax with alpha in (1, 2], in float32, float16 and bfloat16.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.attention.transforms.base import Fused, FusedKind
from attnbench.core.errors import MissingExtraError

WIDEST = 128
"""Of a head, for queries and keys as for values."""
LEAST = 1e-5
"""Of alpha - 1: softmax but for rounding."""
_KINDS: dict[FusedKind, int] = {"softmax": 0, "topk": 0, "sparsemax": 1, "entmax15": 2, "entmax": 3}
_EXCESS: dict[FusedKind, float] = {"softmax": 1.0, "topk": 1.0, "sparsemax": 1.0, "entmax15": 0.5}
_ALL = 1 << 30
"""More keys than there are: top-k is softmax."""


def attend(
    query: Float[Tensor, "B H Q E"],
    keys: Float[Tensor, "B H K E"],
    values: Float[Tensor, "B H K E2"],
    transform: Fused,
    *,
    scale: float,
    valid: Bool[Tensor, "B K"] | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "B H Q E2"]:
    """Context of every query, in the type of the values. scale: of the products. causal: query i stands at the place
    K - Q + i of the keys. dropout: on the weights, drawn from torch's generator.

    Raises MissingExtraError where neither Triton nor a GPU is there.
    """
    if kernels() is None or not (query.is_cuda or interpreted()):
        raise MissingExtraError(
            "the backend 'triton' needs a CUDA device and the package triton; drop `backend: triton`, or take both"
        )
    wide = functools.reduce(torch.promote_types, (each.dtype for each in (query, keys, values)))
    if interpreted() and wide == torch.bfloat16:  # whose bits Triton's interpreter would multiply as whole numbers
        wide = torch.float32
    query, keys, held = query.to(wide), keys.to(wide), values.to(wide)
    heads = query.shape[1]
    excess = transform.excess
    if not isinstance(excess, Tensor):
        excess = torch.full((heads,), _EXCESS.get(transform.kind, excess), device=query.device)
    seed = int(torch.randint(1 << 30, ())) if dropout else 0
    given = _Given(_KINDS[transform.kind], transform.k or _ALL, scale, causal, dropout, seed)
    context: Tensor = _Attention.apply(
        query, keys, held, excess.float().clamp(min=LEAST).expand(heads).contiguous(), valid, given
    )  # pyright: ignore[reportAssignmentType]
    return context.to(values.dtype)


@functools.cache
def kernels() -> Any:
    """The module of kernels; None without Triton."""
    try:
        return importlib.import_module("attnbench.attention.backends._kernels")
    except ImportError:
        return None


def interpreted() -> bool:
    """Whether kernels run as plain Python, on any device: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _Given(NamedTuple):
    """What a call does not differentiate."""

    kind: int
    k: int
    scale: float
    causal: bool
    dropout: float
    seed: int


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, excess: Tensor, valid: Tensor | None, given: _Given
    ) -> Tensor:
        query, keys, values = (_last_dense(each) for each in (query, keys, values))
        batch, heads, rows, _ = query.shape
        out = values.new_empty(batch, heads, rows, values.shape[3])
        grows = any(ctx.needs_input_grad[:4])
        # what has no use is not read or written: any tensor stands for it
        slope = out.new_empty(out.shape, dtype=torch.float32) if grows and given.kind else excess
        threshold, most, total = (
            excess.new_empty(batch, heads, rows) if grows else excess for _ in range(3)
        )  # fmt: skip
        mask = excess if valid is None else valid.expand(batch, -1).contiguous().view(torch.uint8)
        sizes = _sizes(query, keys, values)
        if out.numel():
            kernels().forward[_grid(rows, sizes["BLOCK_M"], batch * heads)](
                query, keys, values, out, slope, threshold, most, total, mask, excess,
                *_strides(query, keys, values, out), mask.stride(0),
                heads, rows, keys.shape[2], query.shape[3], values.shape[3], keys.shape[2] - rows,
                given.scale, given.k, given.seed, given.dropout,
                KIND=given.kind, CAUSAL=given.causal, VALID=valid is not None, DROPOUT=given.dropout > 0,
                GRADIENT=grows, **sizes,
            )  # fmt: skip
        ctx.given = given
        ctx.save_for_backward(query, keys, values, excess, mask, out, slope, threshold, most, total)
        ctx.masked = valid is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, keys, values, excess, mask, out, slope, threshold, most, total = ctx.saved_tensors
        given: _Given = ctx.given
        up = _last_dense(upstream[0])
        batch, heads, rows, _ = query.shape
        mean = (up.float() * (slope if given.kind else out.float())).sum(-1)
        learned = ctx.needs_input_grad[3]
        of_excess = torch.empty_like(mean) if learned else excess
        slopes = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, keys, values))
        common = (
            heads, rows, keys.shape[2], query.shape[3], values.shape[3], keys.shape[2] - rows,
            given.scale, given.seed, given.dropout,
        )  # fmt: skip
        fixed = {
            "KIND": given.kind, "CAUSAL": given.causal, "VALID": ctx.masked, "DROPOUT": given.dropout > 0,
            **_sizes(query, keys, values, backward=True),
        }  # fmt: skip
        read = (query, keys, values, up, mean.contiguous(), threshold, most, total, mask, excess)
        strides = _strides(query, keys, values, up)
        if out.numel() and keys.shape[2]:
            kernels().backward_query[_grid(rows, fixed["BLOCK_M"], batch * heads)](
                *read, slopes[0], of_excess, *strides, *slopes[0].stride()[:3], mask.stride(0), *common,
                LEARNED=learned, **fixed,
            )  # fmt: skip
            kernels().backward_key[_grid(keys.shape[2], fixed["BLOCK_N"], batch * heads)](
                *read, slopes[1], slopes[2], *strides, *slopes[1].stride()[:3], *slopes[2].stride()[:3],
                mask.stride(0), *common, **fixed,
            )  # fmt: skip
        else:
            for each in (*slopes, *((of_excess,) if learned else ())):
                each.zero_()
        return *slopes, of_excess.sum((0, 2)) if learned else None, None, None


def _last_dense(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _strides(query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> tuple[int, ...]:
    return tuple(stride for each in (query, keys, values, out) for stride in each.stride()[:3])


def _grid(rows: int, block: int, heads: int) -> tuple[int]:
    return (-(-rows // block) * heads,)


def _sizes(query: Tensor, keys: Tensor, values: Tensor, *, backward: bool = False) -> dict[str, Any]:
    """Tiles and number of warps; a product wants 16 of everything at least."""
    width, value_width = (max(16, 1 << (each.shape[3] - 1).bit_length()) for each in (query, values))
    exact = query.dtype == torch.float32
    wide = max(width, value_width) > 64
    block = 32 if exact and (wide or backward) else 64
    fitting = max(16, 1 << (query.shape[2] - 1).bit_length())  # one query, as in a step of decoding, has a small tile
    sizes = {
        "BLOCK_M": min(block, fitting),
        "BLOCK_N": block,
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
    }
    return sizes if interpreted() else {**sizes, "num_warps": 8 if wide and not exact else 4, "num_stages": 2}
