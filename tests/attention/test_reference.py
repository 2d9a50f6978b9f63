"""The reference pipeline against the formulas written out term by term in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from attnbench.attention.catalog import build_transform
from attnbench.attention.patterns.base import causal
from attnbench.attention.reference import attend
from attnbench.attention.scores.dot import dot, scaled_dot
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.types import Positions

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 4, 5, 2
NAN = float("nan")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def inputs():
    query, keys = draw(BATCH, HEADS, QUERIES, WIDTH), draw(BATCH, HEADS, KEYS, WIDTH, seed=1)
    values = draw(BATCH, HEADS, KEYS, WIDTH, seed=2)
    valid = torch.tensor([[True, True, False, True, True], [True, True, True, True, False]])
    return query, keys, values, valid


def by_hand(query, keys, values, valid, *, scale, may_look, k=None):
    """Context and weights as nested loops over Python floats."""
    context = torch.zeros(BATCH, HEADS, QUERIES, WIDTH, dtype=torch.float64)
    weights = torch.zeros(BATCH, HEADS, QUERIES, KEYS, dtype=torch.float64)
    for b in range(BATCH):
        for h in range(HEADS):
            for i in range(QUERIES):
                open_ = [j for j in range(KEYS) if valid[b, j] and may_look(i, j)]
                score = {
                    j: sum(float(query[b, h, i, e]) * float(keys[b, h, j, e]) for e in range(WIDTH)) * scale
                    for j in open_
                }
                best = sorted(open_, key=lambda j: -score[j])[:k]
                mass = {j: math.exp(score[j]) for j in best}
                for j in best:
                    weights[b, h, i, j] = mass[j] / sum(mass.values())
                for e in range(WIDTH):
                    context[b, h, i, e] = sum(float(weights[b, h, i, j]) * float(values[b, h, j, e]) for j in best)
    return context, weights


@pytest.mark.parametrize(("score", "scale"), [(dot, 1.0), (scaled_dot, WIDTH**-0.5)])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_formulas_written_out(inputs, score, scale, k, masked):
    query, keys, values, valid = inputs
    transform = softmax if k is None else build_transform("topk", k=k)
    # queries are the last of the positions, as in a decode step with a cache
    positions = Positions(torch.arange(KEYS - QUERIES, KEYS), torch.arange(KEYS))
    found = attend(
        query, keys, values, score=score, transform=transform, positions=positions,
        rule=causal if masked else None, valid=valid if masked else None,
    )  # fmt: skip
    everything = torch.ones(BATCH, KEYS, dtype=torch.bool)
    wanted = by_hand(
        query, keys, values, valid if masked else everything, scale=scale, k=k,
        may_look=lambda i, j: not masked or j <= i + KEYS - QUERIES,
    )  # fmt: skip
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-12)


def test_a_masked_key_and_its_value_may_be_nan(inputs):
    query, keys, values, valid = inputs
    positions = Positions(torch.arange(QUERIES), torch.arange(KEYS))
    wanted = attend(query, keys, values, score=dot, transform=softmax, positions=positions, valid=valid)
    hole = ~valid[:, None, :, None].expand_as(keys)
    spoilt = attend(
        query, keys.masked_fill(hole, NAN), values.masked_fill(hole, NAN),
        score=dot, transform=softmax, positions=positions, valid=valid,
    )  # fmt: skip
    assert torch.equal(spoilt[0], wanted[0])
    assert torch.equal(spoilt[1], wanted[1])


def test_a_row_without_keys_receives_nothing(inputs):
    query, keys, values, valid = inputs
    positions = Positions(torch.arange(QUERIES), torch.arange(KEYS))
    valid = valid & torch.tensor([[True], [False]])
    context, weights = attend(query, keys, values, score=dot, transform=softmax, positions=positions, valid=valid)
    assert torch.equal(context[1], torch.zeros_like(context[1]))
    assert torch.equal(weights[1], torch.zeros_like(weights[1]))
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(HEADS, QUERIES, dtype=torch.float64))
