"""Products with a cache are those of matrices, read from any part of it."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.backends import single
from attnbench.core import native

compiled = pytest.mark.skipif(native.load(single._SOURCE) is None, reason="no C++ compiler: matrix products serve")


def cache(rows, heads, capacity, width):
    return torch.randn(rows, heads, capacity, width)


@compiled
@pytest.mark.parametrize(
    ("rows", "heads", "filled", "width"), [(1, 1, 1, 1), (3, 2, 7, 5), (40, 4, 33, 64), (2, 3, 90, 17)]
)
@pytest.mark.parametrize("layout", ["part", "heads last"])
def test_products(rows, heads, filled, width, layout, monkeypatch):
    held = cache(rows, heads, filled + 9, width)[:, :, :filled]
    if layout == "heads last":
        held = cache(rows, filled, heads, width).transpose(1, 2)
    query, weights = torch.randn(rows, heads, 1, width), torch.rand(rows, heads, 1, filled)
    assert single._serves(query, held)
    found = single.compare(query, held), single.blend(weights, held)
    torch.testing.assert_close(found[0], query @ held.transpose(-2, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], weights @ held, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(single, "_serves", lambda *given: False)
    torch.testing.assert_close(single.compare(query, held), found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single.blend(weights, held), found[1], rtol=1e-5, atol=1e-5)


@compiled
def test_a_value_of_weight_0_adds_nothing_whatever_it_holds():
    values = torch.tensor([[[[1.0, 2.0], [float("nan"), float("inf")], [3.0, 4.0]]]])
    assert single.blend(torch.tensor([[[[0.5, 0.0, 0.5]]]]), values).tolist() == [[[[2.0, 3.0]]]]


def test_what_others_serve():
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    assert not single._serves(query.double(), keys.double())
    assert not single._serves(torch.randn(2, 2, 3, 4), keys)
    assert not single._serves(query[:1], keys)
    assert not single._serves(query.requires_grad_(), keys)
    assert single.compare(query, keys).requires_grad


@pytest.mark.parametrize("product", [single.compare, single.blend])
def test_shapes_that_do_not_fit_are_an_error(product):
    with pytest.raises(RuntimeError):
        product(torch.randn(1, 1, 1, 2), torch.randn(1, 1, 3, 64))
