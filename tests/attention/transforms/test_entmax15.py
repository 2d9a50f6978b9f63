from __future__ import annotations

import entmax as peer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from attnbench.attention.transforms.entmax15 import entmax15


def by_root_finding(row: list[float]) -> list[float]:
    top = max(row) / 2
    tau = brentq(lambda t: sum(max(z / 2 - t, 0) ** 2 for z in row) - 1, top - 1 - 1e-9, top, xtol=1e-15, rtol=1e-15)
    return [max(z / 2 - tau, 0) ** 2 for z in row]


def test_equals_the_entmax_package(case, agree):
    agree(entmax15, lambda z: peer.entmax15(z, dim=-1), case, 1e-8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12))
def test_equals_root_finding(row):
    found = entmax15(torch.tensor(row, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(by_root_finding(row), dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("argument", ["keep", "upper"])
def test_refuses(argument):
    with pytest.raises(ValueError, match=f"takes no '{argument}'"):
        entmax15(torch.zeros(2, 2), **{argument: torch.ones(2, dtype=torch.bool)})
