"""Dot products against numpy's einsum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attnbench.attention.scores.base import scores
from attnbench.attention.scores.dot import ScaledDot
from attnbench.attention.types import Dims


@pytest.mark.parametrize(("kind", "scale"), [("dot", 1.0), ("scaled_dot", 5**-0.5)])
def test_equals_einsum(kind, scale):
    rng = np.random.default_rng(0)
    query, keys = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 3, 6, 5))
    score = scores.parse(kind).build(Dims(heads=3))
    found = score(torch.from_numpy(query), torch.from_numpy(keys))
    np.testing.assert_allclose(found.numpy(), scale * np.einsum("bhqe,bhke->bhqk", query, keys), atol=1e-13)


class _Near(ScaledDot):
    def forward(self, query: Tensor, keys: Tensor, feature: Tensor | None = None) -> Tensor:
        return -torch.cdist(query, keys)


def test_a_score_of_another_kind_is_not_taken_for_its_parent():
    """Else kernels would multiply queries and keys, and nothing said."""
    dims = Dims(heads=3)
    assert _Near(dims).scale is None
    assert ScaledDot(dims).scale == dims.query_width**-0.5
