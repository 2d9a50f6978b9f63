"""Exhaustion: c times what is left, nothing for the sink, no gradient."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.biases.base import biases
from attnbench.attention.types import Dims, Positions

AT = Positions(torch.arange(1), torch.arange(3))


def test_adds_c_times_what_is_left_and_nothing_at_the_sink():
    left = torch.tensor([[[[2.0, 0.5, float("inf")]]]], requires_grad=True)
    added = biases.parse({"kind": "exhaustion", "c": 0.4}).build(Dims())(AT, left)
    torch.testing.assert_close(added, torch.tensor([[[[0.8, 0.2, 0.0]]]]))
    assert not added.requires_grad


def test_the_default_c_is_the_paper_s():
    assert biases.parse("exhaustion").dump()["c"] == 0.2


def test_without_bounds_it_is_refused():
    with pytest.raises(ValueError, match="may still receive"):
        biases.parse("exhaustion").build(Dims())(AT, None)
