"""Dropout that draws 16 random bits an element, each from a key and the element's place, and adds what is kept to
something in the same pass. On a processor random numbers that come one after the other are most of its cost."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int16, Int32, Int64
from torch import Tensor, nn

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_dropout.cpp")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_STEPS = 1 << 16
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))
"""Of Wellons's lowbias32 (nullprogram.com/blog/2018/07/31): shifts, and factors as whole numbers with a sign."""
_COMPILED = {
    "drop": {(torch.float32,), (torch.bfloat16,)},
    "add": {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)},
    "pass": {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)},
}
"""Functions of _dropout.cpp, and the types that there are of each: of x; of x and what it is added to; of the gradient
of the result and that of x."""


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Tensor | None, steps: int) -> Tensor:
        key = torch.empty(1, dtype=torch.int64, device=x.device).random_(-(2**63), None)
        bound, ctx.scale, ctx.dtype = steps - _STEPS // 2, _STEPS / (_STEPS - steps), x.dtype
        ctx.dtype_to = None if to is None else to.dtype
        given = (x,) if to is None else (x, to)
        compiled = _compiled("drop" if to is None else "add", tuple(each.dtype for each in given), *given)
        if compiled is not None:
            read = [each.contiguous() for each in given]
            out = torch.empty_like(read[-1])
            dropped = torch.empty(x.shape, dtype=torch.bool, device=x.device)
            compiled(
                *map(native.at, read), ctypes.c_uint64(int(key)), ctypes.c_int(bound), ctypes.c_float(ctx.scale),
                native.at(out), native.at(dropped), ctypes.c_int64(x.numel()), torch.get_num_threads(),
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
        grad_to = grad.to(ctx.dtype_to) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_to, None
        compiled = None if torch.is_grad_enabled() else _compiled("pass", (grad.dtype, ctx.dtype), grad)
        if compiled is None:
            return (grad * ctx.scale).masked_fill_(dropped, 0.0).to(ctx.dtype), grad_to, None
        grad = grad.contiguous()
        grad_x = torch.empty(grad.shape, dtype=ctx.dtype, device=grad.device)
        compiled(
            native.at(grad), native.at(dropped), ctypes.c_float(ctx.scale), native.at(grad_x),
            ctypes.c_int64(grad.numel()), torch.get_num_threads(),
        )  # fmt: skip
        return grad_x, grad_to, None


def _drawn(key: Int64[Tensor, "1"], count: int) -> Int16[Tensor, "count"]:
    """The numbers of so many places, two from each word."""
    factor, summand = key.view(torch.int32)
    words = torch.arange((count + 1) // 2, dtype=torch.int32, device=key.device).mul_(factor | 1).add_(summand)
    for shift, factor in _ROUNDS:
        _mix(words, shift).mul_(factor)
    return _mix(words, 16).view(torch.int16)[:count]


def _mix(words: Int32[Tensor, "W"], shift: int) -> Int32[Tensor, "W"]:
    """Each word, changed by its own upper bits."""
    return words.bitwise_xor_((words >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _compiled(name: str, dtypes: tuple[torch.dtype, ...], *given: Tensor) -> Any:
    """The compiled function that does this in one pass, and gives the same; None where there is none for these."""
    if dtypes not in _COMPILED[name] or any(each.device.type != "cpu" for each in given):
        return None
    library = native.load(_SOURCE) if native.readable(*given) else None
    if library is None:
        return None
    return getattr(library, f"attnbench_{name}_{'_to_'.join(_NAMES[each] for each in dtypes)}")


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
        """to: what the result is added to. Raises ValueError where that has another shape."""
        if to is not None and to.shape != x.shape:
            raise ValueError(f"{tuple(x.shape)} cannot be added to {tuple(to.shape)} place by place")
        if not self.training or not self.p:
            return x if to is None else to + x
        if x.device.type == "cpu":
            steps = min(round(self.p * _STEPS), _STEPS - 1)
            return _Dropout.apply(x, to, steps)  # pyright: ignore[reportReturnType]
        kept = nn.functional.dropout(x, self.p)
        return kept if to is None else to + kept

    def extra_repr(self) -> str:
        return f"p={self.p}"
