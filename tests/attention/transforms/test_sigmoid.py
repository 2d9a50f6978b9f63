"""Sigmoid against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import expit

from attnbench.attention.transforms.base import transforms
from attnbench.attention.transforms.sigmoid import sigmoid


def test_equals_scipy(case):
    """Weights, and the derivative p (1 - p)."""
    scores = case.scores.clone().requires_grad_()
    found = sigmoid(scores, valid=case.valid)
    wanted = expit(case.scores.numpy())
    mask = 1.0 if case.valid is None else case.valid.numpy()
    np.testing.assert_allclose(found.detach().numpy(), wanted * mask, atol=1e-15)
    upstream = np.random.default_rng(0).normal(size=wanted.shape)
    (found * torch.from_numpy(upstream)).sum().backward()
    np.testing.assert_allclose(scores.grad.numpy(), upstream * wanted * (1 - wanted) * mask, atol=1e-14)


def test_each_gate_stands_alone():
    scores = torch.tensor([[0.0, 2.0, -3.0]])
    assert sigmoid(scores)[0].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(3))])
    assert torch.equal(sigmoid(scores + torch.tensor([0.0, 5.0, 7.0]))[..., 0], sigmoid(scores)[..., 0])


@pytest.mark.parametrize("size", [88.0, 1e4, 1e30, 3e38])
def test_huge_scores_open_or_close_the_gate(size):
    scores = torch.tensor([size, -size], requires_grad=True)
    weights = sigmoid(scores)
    assert weights.tolist() == pytest.approx([1.0, 0.0], abs=1e-30)
    weights.sum().backward()
    assert scores.grad.isfinite().all()


def test_keep_changes_nothing():
    scores = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(sigmoid(scores, keep=torch.tensor([True, False, False])), sigmoid(scores))


def test_refuses_upper():
    with pytest.raises(ValueError, match="'sigmoid' takes no 'upper'"):
        sigmoid(torch.zeros(2, 2), upper=torch.ones(2))


def test_it_says_that_its_rows_are_gates():
    assert transforms.get("sigmoid").rows == "gates"
    assert transforms.get("sigmoid").from_budget(4, "cross") is None
