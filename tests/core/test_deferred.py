"""A linear layer of a loop whose weight gets its gradient at once: the numbers are those of the layer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attnbench.core.deferred import Deferred

STEPS, ROWS, INPUTS, OUTPUTS = 4, 3, 5, 6


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and additions of all steps, weight and bias."""
    torch.manual_seed(0)
    shapes = (STEPS, ROWS, INPUTS), (STEPS, ROWS, OUTPUTS), (OUTPUTS, INPUTS), (OUTPUTS,)
    inputs, plus, weight, bias = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return inputs, plus, weight, bias


def loop(layer: Any, inputs: Tensor, plus: Tensor | None) -> Tensor:
    """Each step reads what the one before gave."""
    state, made = torch.zeros_like(inputs[0]), []
    for step, given in enumerate(inputs):
        found = layer(torch.tanh(given + state), None if plus is None else plus[step])
        state = found[:, : inputs.shape[2]]
        made.append(found)
    return torch.stack(made)


def plain(weight: Tensor, bias: Tensor | None) -> Any:
    return lambda inputs, plus: linear(inputs, weight, bias) + (0 if plus is None else plus)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_numbers_and_gradients_are_those_of_the_layer(adds: bool, biased: bool):
    inputs, plus, weight, bias = drawn()
    given, of = plus if adds else None, bias if biased else None
    wanted, found = (loop(layer, inputs, given) for layer in (plain(weight, of), Deferred(weight, of)))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    sought = [inputs, weight, *([plus] if adds else []), *([bias] if biased else [])]
    upstream = torch.randn_like(wanted)
    for mine, theirs in zip(*(torch.autograd.grad(each, sought, upstream) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_the_weight_gets_one_gradient_of_all_steps():
    inputs, _, weight, bias = drawn()
    arrived: list[Tensor] = []
    held = weight * 2  # made by other operations, as cut and joined weights are
    held.register_hook(arrived.append)
    loop(Deferred(held, bias), inputs, None).sum().backward()
    assert len(arrived) == 1
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 2 * arrived[0])


def test_each_backward_pass_counts_its_own_steps():
    inputs, _, weight, bias = drawn()
    layer = Deferred(weight, bias)
    found = loop(layer, inputs, None)
    (alone,) = torch.autograd.grad(found.sum(), weight, retain_graph=True)
    torch.autograd.grad(found.sum(), inputs, retain_graph=True)  # which leaves the weight out
    assert not layer._notes
    (again,) = torch.autograd.grad(found.sum(), weight, retain_graph=True)
    (part,) = torch.autograd.grad(found[:2].sum(), weight)
    assert torch.equal(alone, again)
    wanted = torch.autograd.grad(loop(plain(weight, bias), inputs, None)[:2].sum(), weight)[0]
    torch.testing.assert_close(part, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_what_needs_no_gradient_gets_none(frozen: str):
    inputs, _, weight, bias = drawn()
    for name, each in (("weight", weight), ("bias", bias)):
        each.requires_grad_(frozen not in (name, "both"))
    loop(Deferred(weight, bias), inputs, None).sum().backward()
    assert (weight.grad is None) == (frozen != "bias")
    assert (bias.grad is None) == (frozen != "weight")
    assert inputs.grad is not None


def test_a_layer_that_no_step_used_gets_no_gradient():
    inputs, _, weight, bias = drawn()
    Deferred(weight, bias)
    used = Deferred(weight.detach(), bias)
    loop(used, inputs, None).sum().backward()
    assert weight.grad is None


def test_under_autocast_products_are_of_its_type_and_gradients_of_the_weights():
    inputs, plus, weight, bias = drawn(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = Deferred(weight, bias)
        found = loop(layer, inputs, plus)
        wanted = loop(plain(weight, bias), inputs, plus)
    assert layer(inputs[0]).dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.05, atol=0.05)
    found.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    (exact,) = torch.autograd.grad(loop(plain(weight, bias), inputs, plus).sum(), weight)
    torch.testing.assert_close(weight.grad, exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))


def test_a_pass_that_fails_holds_nothing_when_its_graph_is_gone():
    inputs, _, weight, bias = drawn()
    layer, given = Deferred(weight, bias), inputs * 1  # autograd comes to the later one first

    class Fail:
        def __call__(self, _: Tensor) -> None:
            raise MemoryError

    hook = Fail()
    kept = weakref.ref(hook)  # which the graph holds
    given.register_hook(hook)
    found = loop(layer, given, None)
    with pytest.raises(MemoryError):
        found.sum().backward()
    del layer, given, found, hook
    gc.collect()
    assert kept() is None


def test_in_a_type_that_autocast_leaves_alone_it_stays():
    inputs, plus, weight, bias = drawn()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loop(Deferred(weight, bias), inputs, plus)
    assert torch.equal(found, loop(Deferred(weight, bias), inputs, plus))


def test_it_is_of_the_autocast_in_which_it_was_made():
    inputs, _, weight, bias = drawn(torch.float32)
    layer = Deferred(weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(inputs[0])
    assert found.dtype == torch.float32
    found.sum().backward()
    assert weight.grad is not None


def test_a_weight_that_was_changed_in_between_is_refused():
    inputs, _, weight, bias = drawn()
    found = loop(Deferred(weight, bias), inputs, None).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


def test_there_is_no_second_derivative():
    inputs, _, weight, bias = drawn()
    found = loop(Deferred(weight, bias), inputs, None).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found, weight, create_graph=True)


@torch.no_grad()
def test_without_gradients_it_is_the_layer():
    inputs, plus, weight, bias = drawn()
    layer = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)
    layer.load_state_dict({"weight": weight, "bias": bias})
    found = Deferred(layer.weight, layer.bias)(inputs[0], plus[0])
    torch.testing.assert_close(found, layer(inputs[0]) + plus[0], rtol=0, atol=1e-14)
