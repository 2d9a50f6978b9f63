"""Dropout that draws 16 random bits an element: on a processor the random numbers are most of its cost."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_dropout.cpp")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_STEPS = 1 << 16


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device)
        bits = words.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
        ctx.scale = _STEPS / (_STEPS - steps)
        if _serves(x):
            x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
            dropped = torch.empty(x.shape, dtype=torch.bool, device=x.device)
            _call(
                "drop", x.dtype, native.at(x), native.at(bits), ctypes.c_int(steps - _STEPS // 2),
                ctypes.c_float(ctx.scale), native.at(out), native.at(dropped), ctypes.c_int64(x.numel()),
            )  # fmt: skip
            ctx.save_for_backward(dropped)
            return out
        dropped = bits < steps - _STEPS // 2
        ctx.save_for_backward(dropped)
        return (x * ctx.scale).masked_fill_(dropped, 0.0)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (dropped,) = ctx.saved_tensors
        if _serves(upstream[0]) and not torch.is_grad_enabled():
            grad = upstream[0].contiguous()
            out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
            _call(
                "pass", grad.dtype, native.at(grad), native.at(dropped), ctypes.c_float(ctx.scale), native.at(out),
                ctypes.c_int64(grad.numel()),
            )  # fmt: skip
            return out, None
        return (upstream[0] * ctx.scale).masked_fill_(dropped, 0.0), None


def _serves(x: Tensor) -> bool:
    """Whether the compiled path takes this tensor; it gives the same, in one pass."""
    return x.dtype in _NAMES and native.readable(x) and native.load(_SOURCE) is not None


def _call(direction: str, dtype: torch.dtype, *given: Any) -> None:
    library: Any = native.load(_SOURCE)
    getattr(library, f"attnbench_{direction}_{_NAMES[dtype]}")(*given, torch.get_num_threads())


class Dropout(nn.Module):
    """In training, each element is 0 with probability p and else times 1 / (1 - p); p is kept to 1/65536.

    Draws from torch's global generator, like nn.Dropout, which takes over on other devices than the processor.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"a dropout probability lies in [0, 1), not at {p}")
        self.p = p

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        if not self.training or not self.p:
            return x
        if x.device.type != "cpu":
            return nn.functional.dropout(x, self.p)
        return _Dropout.apply(x, min(round(self.p * _STEPS), _STEPS - 1))  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        return f"p={self.p}"
