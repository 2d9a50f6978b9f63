"""Attention in chunks of queries gives what one pass gives, dropout included, and keeps no scores for backward."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.backends import chunked
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import patterns
from attnbench.attention.scores.base import scores
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import Dims, Positions

SITES = {
    "topk_oow": ("full", {"kind": "topk_oow", "n": 5}),
    "topk": ("full", {"kind": "topk", "k": 3}),
    "learned": ("full", {"kind": "entmax", "alpha": "learned"}),
    "random": ({"kind": "random", "n": 3}, "softmax"),
}
LENGTH = 23


def module(name, role, dropout=0.0):
    torch.manual_seed(3)
    pattern, transform = SITES[name]
    site = Site(scores.parse("bilinear"), patterns.parse(pattern), transforms.parse(transform), backend="dense")
    return MultiHead(site, role, 8, Dims(heads=2, query_width=8, key_width=8), dropout).double()


def run(built, states, valid):
    """Context, gradients, and the most elements of a tensor that backward keeps."""
    kept = []
    at = Positions(torch.arange(LENGTH), torch.arange(LENGTH))
    states = states.clone().requires_grad_()
    torch.manual_seed(11)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        context = built(states, built.memorize(states, valid), at).context
    gradients = torch.autograd.grad(context.square().sum(), [states, *built.parameters()])
    return [context, *gradients], max(kept)


@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize("name", SITES)
def test_chunks_change_nothing(name, role, monkeypatch):
    built = module(name, role)
    states = torch.randn(2, LENGTH, 8, dtype=torch.float64)
    valid = None if role == "decoder_self" else torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])
    whole, most = run(built, states, valid)
    assert most >= 2 * 2 * LENGTH * LENGTH
    monkeypatch.setattr(chunked, "LIMIT", 16 * 2 * 2 * LENGTH)
    parts, most = run(built, states, valid)
    assert most < 2 * 2 * LENGTH * LENGTH
    for part, one in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, one, rtol=0, atol=1e-10)


def test_dropout_is_drawn_once_for_forward_and_backward(monkeypatch):
    """With the weights of one draw the gradient at the values is what the context says it is."""
    built = module("topk_oow", "encoder_self", dropout=0.5).train()
    monkeypatch.setattr(chunked, "LIMIT", 16 * 2 * LENGTH)
    states = torch.randn(1, LENGTH, 8, dtype=torch.float64)
    at = Positions(torch.arange(LENGTH), torch.arange(LENGTH))
    values = torch.randn(1, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    context = built(states, built.memorize(states, None, values), at).context - built.project_context.bias
    value_bias = built.project_memory.bias[8:]
    (slope,) = torch.autograd.grad(context.sum(), values)
    assert not value_bias.any()  # so the context is linear in the values
    torch.testing.assert_close((slope * values).sum(), context.sum(), rtol=0, atol=1e-10)


def test_weights_that_are_asked_for_come_from_one_pass(monkeypatch):
    monkeypatch.setattr(chunked, "LIMIT", 1)
    built = module("topk", "encoder_self")
    states = torch.randn(1, LENGTH, 8, dtype=torch.float64)
    at = Positions(torch.arange(LENGTH), torch.arange(LENGTH))
    told = built(states, built.memorize(states, None), at, need_weights=True)
    quick = built(states, built.memorize(states, None), at)
    assert quick.weights is None
    torch.testing.assert_close(quick.context, told.context, rtol=0, atol=1e-10)
