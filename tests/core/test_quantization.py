"""Rows rounded to 8 bits: torch's own quantised tensors as oracle, and what no number can be made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnbench.core.quantization import multiply, quantize


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 5), st.floats(-20, 20))
def test_whole_numbers_as_torch_quantises_channels(rows, inputs, seed, size):
    given_rows = drawn(rows, inputs, seed=seed) * 2.0**size
    whole, step = quantize(given_rows)
    torch.testing.assert_close(step[:, 0], given_rows.abs().amax(1) / 127)
    wanted = torch.quantize_per_channel(given_rows, step[:, 0].double(), torch.zeros(rows), 0, torch.qint8)
    apart = (whole - wanted.int_repr()).abs()
    between = (given_rows / step).frac().abs() - 0.5  # halves: the last digit of a quotient decides
    assert (apart[between.abs() > 1e-4] == 0).all()
    assert apart.max() <= 1
    assert ((whole * step - given_rows).abs() <= step * 0.5001).all()


def test_a_step_is_divided_by_and_not_multiplied_by_its_inverse():
    """127 times the rounded inverse of the largest number would move the second one past a half."""
    assert quantize(torch.tensor([[2.460373640060425, 1.2495598793029785]])).whole.tolist() == [[127, 64]]


def test_halves_go_to_the_even_neighbour_and_the_ends_are_reached():
    assert quantize(torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, 0.0]])).whole.tolist() == [[127, -127, 0, 2, -2, 0]]


def test_a_row_of_zeros_stays_one():
    for least in (0.0, 1e-31, 1e-45):
        whole, step = quantize(torch.full((1, 3), least))
        assert whole.tolist() == [[0, 0, 0]]
        assert step.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_what_is_no_number_gives_none(value):
    states, weight = drawn(3, 5), drawn(4, 5, seed=1)
    states[1, 2] = value
    found = multiply(states, quantize(weight))
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], multiply(states[[0, 2]], quantize(weight)))


def test_products_of_large_and_small_numbers_are_near_those_of_the_numbers():
    states, weight, bias = drawn(20, 300) * 1e12, drawn(40, 300, seed=1) * 1e-12, drawn(40, seed=2)
    wanted = torch.nn.functional.linear(states, weight, bias)
    found = multiply(states, quantize(weight), bias)
    assert 1e-4 < (found - wanted).norm() / wanted.norm() < 0.02
    torch.testing.assert_close(multiply(states[None], quantize(weight), bias), found[None])


def test_autocast_changes_nothing():
    states, weight = drawn(20, 300), quantize(drawn(40, 300, seed=1))
    wanted = multiply(states, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(multiply(states, weight), wanted)
