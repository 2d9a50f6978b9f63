"""Dropout that draws 16 random bits an element: on a processor the random numbers are most of its cost."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

_STEPS = 1 << 16


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
        bits = words.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
        dropped = bits < steps - _STEPS // 2
        ctx.save_for_backward(dropped)
        ctx.scale = _STEPS / (_STEPS - steps)
        return (x * ctx.scale).masked_fill_(dropped, 0.0)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (dropped,) = ctx.saved_tensors
        return (upstream[0] * ctx.scale).masked_fill_(dropped, 0.0), None


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
