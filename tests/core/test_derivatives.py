"""What has no second derivative says so, whatever its gradients depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.core.derivatives import once_differentiable


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * ctx.saved_tensors[0] * grads[0]


def test_the_first_derivative_is_given():
    x = torch.randn(3, requires_grad=True)
    _Squared.apply(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("constant", [True, False])
def test_the_second_is_refused_though_the_first_hang_on_nothing(constant):
    x = torch.randn(3, requires_grad=True)
    y = _Squared.apply(x)
    loss = y.sum() if constant else (y**2).sum()
    with pytest.raises(RuntimeError, match="Squared has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)
