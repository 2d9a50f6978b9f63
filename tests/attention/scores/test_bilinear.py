"""Bilinear scores against numpy's einsum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnbench.attention.scores.base import scores
from attnbench.attention.scores.bilinear import Bilinear
from attnbench.attention.types import Dims


@pytest.mark.parametrize("heads", [1, 3])
@torch.no_grad()
def test_equals_einsum(heads):
    rng = np.random.default_rng(0)
    query, states = rng.normal(size=(2, heads, 4, 3)), rng.normal(size=(2, heads, 6, 5))
    score = scores.parse("bilinear").build(Dims(heads=heads, query_width=3, key_width=5)).double()
    assert isinstance(score, Bilinear)
    keys = score.keys(torch.from_numpy(states))
    assert keys.shape == (2, heads, 6, score.key_width) == (2, heads, 6, 3)
    found = score(torch.from_numpy(query), keys)
    wanted = np.einsum("bhqe,hfe,bhkf->bhqk", query, score.weight.numpy(), states)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-12)


@torch.no_grad()
def test_what_a_coverage_adds_meets_the_keys_themselves():
    rng = np.random.default_rng(0)
    query, states, feature = (rng.normal(size=size) for size in ((2, 3, 4, 3), (2, 3, 6, 5), (2, 4, 6, 2)))
    score = scores.parse("bilinear").build(Dims(heads=3, query_width=3, key_width=5, feature_width=2)).double()
    assert isinstance(score, Bilinear)
    keys = score.keys(torch.from_numpy(states))
    assert keys.shape == (2, 3, 6, score.key_width)
    found = score(torch.from_numpy(query), keys, torch.from_numpy(feature))
    assert score.feature_vectors is not None
    wanted = np.einsum("bhqe,hfe,bhkf->bhqk", query, score.weight.numpy(), states)
    wanted += np.einsum("bqkd,hfd,bhkf->bhqk", feature, score.feature_vectors.numpy(), states)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-12)


def test_initial_weights_are_xavier_of_each_head():
    torch.manual_seed(0)
    score = scores.parse("bilinear").build(Dims(heads=2, query_width=32, key_width=96))
    assert isinstance(score, Bilinear)
    bound = (6 / (32 + 96)) ** 0.5
    assert score.weight.abs().max() <= bound
    assert score.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_it_has_no_fields_of_its_own():
    with pytest.raises(ValueError, match="units"):
        scores.parse({"kind": "bilinear", "units": 3})
