"""Dot products against numpy's einsum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnbench.attention.scores.base import scores
from attnbench.attention.types import Dims


@pytest.mark.parametrize(("kind", "scale"), [("dot", 1.0), ("scaled_dot", 5**-0.5)])
def test_equals_einsum(kind, scale):
    rng = np.random.default_rng(0)
    query, keys = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 6, 5))
    score = scores.parse(kind).build(Dims(heads=3))
    found = score(torch.from_numpy(query), torch.from_numpy(keys))
    np.testing.assert_allclose(found.numpy(), scale * np.einsum("bhqe,bhke->bhqk", query, keys), atol=1e-13)
