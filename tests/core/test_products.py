"""Products compiled here are the products, at every edge of their tiles, and the same whatever stands beside a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnbench.core import native, products

pytestmark = pytest.mark.skipif(not products.serves(), reason="no C++ compiler, or it is switched off")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """To the error that sums of float32 can have (Higham 2002, section 3.1)."""
    offset = torch.zeros(len(weight)) if bias is None else bias
    wanted = states.double() @ weight.T.double() + offset.double()
    most = (states.shape[1] + 1) * 2**-24 * (states.double().abs() @ weight.T.double().abs() + offset.abs())
    found = products.multiply(states, products.pack(weight), bias)
    assert ((found.double() - wanted).abs() <= most).all()


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 90), st.booleans())
def test_every_small_shape(rows, inputs, outputs, with_bias):
    assert_product(drawn(rows, inputs), drawn(outputs, inputs), drawn(outputs) if with_bias else None)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "shape",
    [(1, 700, 900), (64, 512, 200), (75, 600, 16), (75, 1100, 33), (600, 513, 130), (400, 512, 16), (333, 40, 5000)],
)
def test_every_way_to_share_and_to_cut_the_work(shape, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, inputs, outputs = shape
        assert_product(drawn(rows, inputs), drawn(outputs, inputs), drawn(outputs))
    finally:
        torch.set_num_threads(before)


def test_operands_lie_as_they_lie():
    states, weight, bias = drawn(30, 50), drawn(40, 50), drawn(80)[::2]
    assert_product(states, weight, bias)
    assert_product(states.T.contiguous().T, weight.T.contiguous().T, bias)
    assert_product(drawn(30, 3, 50)[:, 1], weight[::2])
    assert_product(drawn(30, 100)[:, ::2], weight)
    assert_product(drawn(50).expand(30, 50), weight)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 64, 200])
def test_a_row_is_the_same_whatever_stands_beside_it(rows):
    states, weight, bias = drawn(200, 530), products.pack(drawn(150, 530)), drawn(150)
    assert torch.equal(products.multiply(states[:rows], weight, bias), products.multiply(states, weight, bias)[:rows])


@pytest.mark.parametrize("shape", [(1, 700, 900), (64, 512, 200), (75, 600, 16), (700, 530, 130)])
def test_a_row_is_the_same_however_many_threads_there_are(shape):
    rows, inputs, outputs = shape
    states, weight, bias, before = drawn(rows, inputs), drawn(outputs, inputs), drawn(outputs), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(products.multiply(states, products.pack(weight), bias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_no_rows():
    assert products.multiply(drawn(0, 5), products.pack(drawn(7, 5)), drawn(7)).shape == (0, 7)


def test_nan_and_infinity_stay_in_their_rows():
    states, weight = drawn(9, 20), drawn(40, 20)
    states[4, 3], states[7, 2] = torch.nan, torch.inf
    found = products.multiply(states, products.pack(weight))
    torch.testing.assert_close(found, states @ weight.T, equal_nan=True)


def test_what_does_not_fit_is_refused():
    weight = products.pack(drawn(40, 20))
    with pytest.raises(ValueError, match="states of 19"):
        products.multiply(drawn(3, 19), weight)
    with pytest.raises(ValueError, match=r"bias of \(39,\)"):
        products.multiply(drawn(3, 20), weight, drawn(39))
    with pytest.raises(TypeError, match="float64"):
        products.multiply(drawn(3, 20).double(), weight)
    with pytest.raises(TypeError, match="bfloat16"):
        products.multiply(drawn(3, 20), weight, drawn(40).bfloat16())
    with pytest.raises(TypeError, match="meta"):
        products.pack(drawn(3, 20).to("meta"))


def test_what_it_serves():
    assert products.serves(drawn(3), drawn(3, 3))
    assert not products.serves(drawn(3).double())
    assert not products.serves(drawn(3).to("meta"))
    with native.off():
        assert not products.serves(drawn(3))
