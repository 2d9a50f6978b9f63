from __future__ import annotations

import itertools

import entmax as peer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.attention.transforms.sparsemax import sparsemax


def by_enumeration(row: list[float]) -> list[float]:
    """The projection onto the simplex by trying every support."""
    best, nearest = [], float("inf")
    for size in range(1, len(row) + 1):
        for support in itertools.combinations(range(len(row)), size):
            tau = (sum(row[j] for j in support) - 1) / size
            point = [row[j] - tau if j in support else 0.0 for j in range(len(row))]
            distance = sum((p - z) ** 2 for p, z in zip(point, row, strict=True))
            if min(point) >= 0 and distance < nearest:
                best, nearest = point, distance
    return best


def test_equals_the_entmax_package(case, agree):
    agree(sparsemax, lambda z: peer.sparsemax(z, dim=-1), case, 1e-8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6))
def test_is_the_nearest_point_of_the_simplex(row):
    found = sparsemax(torch.tensor(row, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(by_enumeration(row), dtype=torch.float64), rtol=0, atol=1e-9)


def test_one_hot_from_a_gap_of_one():
    assert sparsemax(torch.tensor([2.0, 1.0, -3.0])).tolist() == [1.0, 0.0, 0.0]
    assert (sparsemax(torch.tensor([2.0, 1.001, -3.0])) > 0).tolist() == [True, True, False]


def test_an_entry_at_the_threshold_is_off_the_support():
    scores = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    sparsemax(scores).backward(torch.tensor([1.0, 5.0], dtype=torch.float64))
    assert scores.grad is not None
    assert scores.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("argument", ["keep", "upper"])
def test_refuses(argument):
    with pytest.raises(ValueError, match=f"takes no '{argument}'"):
        sparsemax(torch.zeros(2, 2), **{argument: torch.ones(2, dtype=torch.bool)})
