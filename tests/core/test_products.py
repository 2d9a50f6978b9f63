"""Products compiled here are the products, at every edge of their tiles, and the same whatever stands beside a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnbench.core import native, products
from attnbench.core.quantization import quantize

pytestmark = pytest.mark.skipif(not products.serves(), reason="no C++ compiler, or it is switched off")
TYPES = [
    pytest.param(torch.float32, id="float32"),
    pytest.param(
        torch.bfloat16, id="bfloat16",
        marks=pytest.mark.skipif(
            not products.serves(dtype=torch.bfloat16), reason="no instructions for bfloat16, or none that are used"
        ),
    ),
    pytest.param(
        torch.int8, id="int8",
        marks=pytest.mark.skipif(
            not products.serves(dtype=torch.int8), reason="no instructions for whole numbers, or none that are used"
        ),
    ),
]  # fmt: skip
each_type = pytest.mark.parametrize("dtype", TYPES)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def product(states: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of rounded operands, in float64; whole numbers are summed up before steps, so that what cancels is 0."""
    if dtype != torch.int8:
        return states.to(dtype).double() @ weight.to(dtype).double().T
    (left, by_row), (right, by_column) = (quantize(each) for each in (states, weight))
    return left.double() @ right.double().T * by_row.double() * by_column.double().T


def assert_product(
    dtype: torch.dtype, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Of rounded operands, to the error that sums of float32 can have (Higham 2002, section 3.1); sums of whole numbers
    have none: they are made a number, multiplied by two steps, and a bias is added."""
    offset = torch.zeros(len(weight)) if bias is None else bias
    multiplied = product(states, weight, dtype)
    wanted = multiplied + offset.double()
    if dtype == torch.int8:
        most = 2**-22 * multiplied.abs() + 2**-23 * offset.abs()
    else:
        most = (states.shape[1] + 1) * 2**-24 * (product(states.abs(), weight.abs(), dtype) + offset.abs())
    found = products.multiply(states, products.pack(weight, dtype), bias)
    assert found.dtype is torch.float32
    assert ((found.double() - wanted).abs() <= most).all()


@each_type
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 90), st.booleans())
def test_every_small_shape(dtype, rows, inputs, outputs, with_bias):
    assert_product(dtype, drawn(rows, inputs), drawn(outputs, inputs), drawn(outputs) if with_bias else None)


@each_type
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 700, 900), (64, 512, 200), (75, 600, 16), (75, 2100, 33), (600, 513, 130), (400, 512, 16), (333, 40, 5000),
        (1, 2100, 900), (2, 4200, 130), (3, 2100, 130),
    ],
)  # fmt: skip
def test_every_way_to_share_and_to_cut_the_work(shape, threads, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, inputs, outputs = shape
        assert_product(dtype, drawn(rows, inputs), drawn(outputs, inputs), drawn(outputs))
    finally:
        torch.set_num_threads(before)


@each_type
def test_operands_lie_as_they_lie(dtype):
    states, weight, bias = drawn(30, 50), drawn(40, 50), drawn(80)[::2]
    assert_product(dtype, states, weight, bias)
    assert_product(dtype, states.T.contiguous().T, weight.T.contiguous().T, bias)
    assert_product(dtype, drawn(30, 3, 50)[:, 1], weight[::2])
    assert_product(dtype, drawn(30, 100)[:, ::2], weight)
    assert_product(dtype, drawn(50).expand(30, 50), weight)


@each_type
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 64, 200])
def test_a_row_is_the_same_whatever_stands_beside_it(rows, dtype):
    states, weight, bias = drawn(200, 2100), products.pack(drawn(150, 2100), dtype), drawn(150)
    assert torch.equal(products.multiply(states[:rows], weight, bias), products.multiply(states, weight, bias)[:rows])


@each_type
@pytest.mark.parametrize("shape", [(1, 700, 900), (64, 512, 200), (75, 600, 16), (700, 2100, 130)])
def test_a_row_is_the_same_however_many_threads_there_are(shape, dtype):
    rows, inputs, outputs = shape
    states, weight, bias, before = drawn(rows, inputs), drawn(outputs, inputs), drawn(outputs), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(products.multiply(states, products.pack(weight, dtype), bias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@each_type
def test_no_rows(dtype):
    assert products.multiply(drawn(0, 5), products.pack(drawn(7, 5), dtype), drawn(7)).shape == (0, 7)


@each_type
def test_nan_and_infinity_stay_in_their_rows(dtype):
    states, weight = drawn(9, 21), drawn(40, 21)
    states[4, 20], states[7, 2] = torch.nan, torch.inf
    found = products.multiply(states, products.pack(weight, dtype))
    wanted = product(states, weight, dtype).float()
    torch.testing.assert_close(found, wanted, equal_nan=True)
    weight[3, 20] = torch.nan
    found = products.multiply(drawn(9, 21), products.pack(weight, dtype))
    assert found[:, 3].isnan().all()
    assert not found[:, [2, 4]].isnan().any()


@each_type
def test_what_lies_behind_a_row_is_not_read(dtype):
    states, weight = torch.full((9, 64), torch.nan), drawn(40, 21)
    states[:, :21] = drawn(9, 21)
    assert_product(dtype, states[:, :21], weight)


@pytest.mark.skipif(not products.serves(dtype=torch.int8), reason="no instructions for whole numbers")
def test_the_largest_whole_numbers_are_summed_up_exactly_to_the_greatest_depth():
    depth = 65_536
    states, weight = torch.ones(2, depth), torch.ones(3, depth)
    weight[1:], states[1, ::2] = -1, -1
    found = products.multiply(states, products.pack(weight, torch.int8))
    torch.testing.assert_close(found, torch.tensor([[1.0, -1, -1], [0, 0, 0]]) * depth)
    with pytest.raises(ValueError, match="depth of 65536, not of 65537"):
        products.pack(torch.ones(2, depth + 1), torch.int8)


@pytest.mark.skipif(not products.serves(dtype=torch.int8), reason="no instructions for whole numbers")
def test_rows_of_nothing_that_counts_are_zeros():
    states = torch.tensor([[1e-31, -1e-40], [0, 0], [1e-29, 0]])
    found = products.multiply(states, products.pack(torch.ones(1, 2), torch.int8))
    assert found[:, 0].tolist() == [0, 0, pytest.approx(1e-29, rel=1e-6, abs=0)]


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
    assert not products.serves(dtype=torch.float16)
    with native.off():
        assert not products.serves(drawn(3))
        assert not products.serves(dtype=torch.bfloat16)
