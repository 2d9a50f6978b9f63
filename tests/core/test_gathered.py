"""What all steps of a loop read gets the gradient that autograd would make step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.core.derivatives import once_differentiable
from attnbench.core.gathered import add_product, gathered, gatherer, sum_of

STEPS = 4


class _Product(torch.autograd.Function):
    """`weights @ held`, whose gradient is a product."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, held: Tensor) -> Tensor:
        ctx.node = gatherer(held)
        ctx.save_for_backward(weights, held)
        return weights @ held

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, held = ctx.saved_tensors
        return grads[0] @ held.mT, add_product(ctx.node, weights, grads[0])


class _Tangent(torch.autograd.Function):
    """The sum of `tanh(query + held)` over held rows, whose gradient is added up."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, held: Tensor) -> Tensor:
        ctx.node = gatherer(held)
        made = torch.tanh(query + held)
        ctx.save_for_backward(made)
        return made.sum(2, keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (made,) = ctx.saved_tensors
        slope = grads[0] * (1 - made**2)
        total, found = sum_of(ctx.node, made)
        total += slope
        return slope.sum(2, keepdim=True), found


def drawn() -> tuple[Tensor, Tensor]:
    """Weights of all steps, and what they read."""
    torch.manual_seed(0)
    shapes = (STEPS, 2, 3, 1, 5), (2, 3, 5, 6)
    weights, held = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return weights, held


def loop(weights: Tensor, held: Tensor, *, known: bool, plain: bool = True) -> Tensor:
    """Steps that read `held` in three ways, each fed with what the one before gave. known: by operations that gather.
    plain: also by one that never does."""
    mix = _Product.apply if known else torch.matmul
    turn = _Tangent.apply if known else lambda query, keys: torch.tanh(query + keys).sum(2, keepdim=True)
    state: Any = torch.zeros_like(held[:, :, :1])
    made = []
    for each in weights:
        mixed: Any = mix(each + state[..., :5], held)
        state = turn(torch.sin(mixed), held)
        if plain:
            state = state + held.mean(2, keepdim=True)
        made.append(state)
    return torch.stack(made)


@pytest.mark.parametrize("plain", [False, True])
def test_values_and_gradients_are_those_of_autograd(plain: bool):
    weights, held = drawn()
    found = loop(weights, gathered(held), known=True, plain=plain)
    wanted = loop(weights, held, known=False, plain=plain)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    upstream = torch.randn_like(wanted)
    slopes = (torch.autograd.grad(each, (weights, held), upstream) for each in (found, wanted))
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_steps_give_autograd_nothing_as_large():
    weights, held = drawn()
    read, arrived = gathered(held), []
    read.register_hook(arrived.append)
    loop(weights, read, known=True, plain=False).sum().backward()
    assert arrived == [None]
    assert held.grad is not None


def test_what_was_not_gathered_has_its_gradient_at_every_step():
    weights, held = drawn()
    (found,) = torch.autograd.grad(loop(weights, held, known=True).sum(), held)
    (wanted,) = torch.autograd.grad(loop(weights, held, known=False).sum(), held)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_each_backward_pass_counts_its_own_steps():
    weights, held = drawn()
    read = gathered(held)
    found = loop(weights, read, known=True)
    (alone,) = torch.autograd.grad(found.sum(), held, retain_graph=True)
    torch.autograd.grad(found.sum(), weights, retain_graph=True)  # which leaves it out
    assert read.grad_fn is not None
    assert not read.grad_fn.gathered_parts  # pyright: ignore[reportAttributeAccessIssue]
    (again,) = torch.autograd.grad(found.sum(), held, retain_graph=True)
    assert torch.equal(alone, again)
    (part,) = torch.autograd.grad(found[:2].sum(), held)
    (wanted,) = torch.autograd.grad(loop(weights, held, known=False)[:2].sum(), held)
    torch.testing.assert_close(part, wanted, rtol=0, atol=1e-10)


def test_what_no_step_used_gets_no_gradient():
    weights, held = drawn()
    read = gathered(held)
    (weights.sum() + 0 * loop(weights, held.detach(), known=True).sum()).backward()
    assert read.requires_grad
    assert held.grad is None


def test_what_needs_no_gradient_gets_none():
    weights, held = drawn()
    loop(weights, gathered(held.detach()), known=True).sum().backward()
    assert weights.grad is not None
    assert held.grad is None


def test_there_is_no_second_derivative():
    weights, held = drawn()
    found = loop(weights, gathered(held), known=True).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found, held, create_graph=True)
