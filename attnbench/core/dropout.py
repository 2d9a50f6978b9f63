"""Dropout that draws 16 random bits an element, each from a key and the element's place, and adds what is kept to
something in the same pass. On a processor random numbers that come one after the other are most of its cost."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int16, Int64
from torch import Tensor, nn

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_dropout.cpp")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_STEPS = 1 << 16
_MIXED = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1))
"""Wellons's lowbias32 (nullprogram.com/blog/2018/07/31): shifts, and factors as whole numbers with a sign."""


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Tensor | None, steps: int) -> Tensor:
        if to is not None and to.shape != x.shape:
            raise ValueError(f"{tuple(x.shape)} cannot be added to {tuple(to.shape)} place by place")
        key = torch.empty(1, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        bound, ctx.scale, ctx.dtype = steps - _STEPS // 2, _STEPS / (_STEPS - steps), x.dtype
        ctx.other = None if to is None else to.dtype
        name = _name("drop", x) if to is None else _name("add", x, to)
        if name is not None:
            x, to = x.contiguous(), None if to is None else to.contiguous()
            out = torch.empty_like(x if to is None else to)
            dropped = torch.empty(x.shape, dtype=torch.bool, device=x.device)
            _call(
                name, native.at(x), *(() if to is None else (native.at(to),)), ctypes.c_uint64(int(key)),
                ctypes.c_int(bound), ctypes.c_float(ctx.scale), native.at(out), native.at(dropped),
                ctypes.c_int64(x.numel()),
            )  # fmt: skip
            ctx.save_for_backward(dropped)
            return out
        dropped = _drawn(key, x.numel()).view(x.shape) < bound
        ctx.save_for_backward(dropped)
        if to is None:
            return (x * ctx.scale).masked_fill_(dropped, 0.0)
        dtype = torch.result_type(x, to)
        wide = torch.promote_types(dtype, torch.float32)
        return (to.to(wide) + (x.to(wide) * ctx.scale).masked_fill_(dropped, 0.0)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dropped,), grad = ctx.saved_tensors, upstream[0]
        other = grad.to(ctx.other) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, other, None
        name = None if torch.is_grad_enabled() else _name("pass", grad, like=ctx.dtype)
        if name is None:
            return (grad * ctx.scale).masked_fill_(dropped, 0.0).to(ctx.dtype), other, None
        grad = grad.contiguous()
        out = torch.empty(grad.shape, dtype=ctx.dtype, device=grad.device)
        _call(
            name, native.at(grad), native.at(dropped), ctypes.c_float(ctx.scale), native.at(out),
            ctypes.c_int64(grad.numel()),
        )  # fmt: skip
        return out, other, None


def _drawn(key: Int64[Tensor, "1"], count: int) -> Int16[Tensor, "count"]:
    """The numbers of so many places, two from each word."""
    factor, summand = key.view(torch.int32)
    words = torch.arange((count + 1) // 2, dtype=torch.int32, device=key.device).mul_(factor | 1).add_(summand)
    for shift, times in _MIXED:
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(times)
    return words.view(torch.int16)[:count]


def _name(does: str, x: Tensor, to: Tensor | None = None, like: torch.dtype | None = None) -> str | None:
    """The compiled function that does this in one pass, with the same numbers; None where there is none."""
    given = (x,) if to is None else (x, to)
    dtypes = [each.dtype for each in given] + ([] if like is None else [like])
    if any(each not in _NAMES for each in dtypes) or not native.readable(*given):
        return None
    library = native.load(_SOURCE)
    name = f"attnbench_{does}_{'_to_'.join(_NAMES[each] for each in dtypes)}"
    return name if library is not None and hasattr(library, name) else None


def _call(name: str, *given: Any) -> None:
    getattr(native.loaded(_SOURCE), name)(*given, torch.get_num_threads())


class Dropout(nn.Module):
    """In training, each element is 0 with probability p and else times 1 / (1 - p); p is kept to 1/65536.

    Draws from torch's global generator, like nn.Dropout, which takes over on other devices than the processor.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"a dropout probability lies in [0, 1), not at {p}")
        self.p = p

    def forward(self, x: Float[Tensor, "..."], to: Float[Tensor, "..."] | None = None) -> Float[Tensor, "..."]:
        """to: what the result is added to, of the same shape."""
        if not self.training or not self.p:
            return x if to is None else to + x
        if x.device.type == "cpu":
            steps = min(round(self.p * _STEPS), _STEPS - 1)
            return _Dropout.apply(x, to, steps)  # pyright: ignore[reportReturnType]
        kept = nn.functional.dropout(x, self.p)
        return kept if to is None else to + kept

    def extra_repr(self) -> str:
        return f"p={self.p}"
