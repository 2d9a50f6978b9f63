"""Products with a cache are those of matrices, read from any part of it."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.backends import few
from attnbench.attention.transforms import _rows
from attnbench.attention.transforms.base import Fused
from attnbench.core import native

compiled = pytest.mark.skipif(native.load(few._SOURCE) is None, reason="no C++ compiler: matrix products serve")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(few, "_LEAST", 1)


def cache(rows, heads, capacity, width):
    return torch.randn(rows, heads, capacity, width)


@compiled
@pytest.mark.parametrize(
    ("rows", "heads", "filled", "width"), [(1, 1, 1, 1), (3, 2, 7, 5), (40, 4, 33, 64), (2, 3, 90, 17)]
)
@pytest.mark.parametrize("layout", ["part", "heads last"])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 6, 10])
def test_products(rows, heads, queries, filled, width, layout, monkeypatch):
    held = cache(rows, heads, filled + 9, width)[:, :, :filled]
    if layout == "heads last":
        held = cache(rows, filled, heads, width).transpose(1, 2)
    query, weights = torch.randn(rows, heads, queries, width), torch.rand(rows, heads, queries, filled)
    assert few._serves(query, held)
    found = few.compare(query, held), few.blend(weights, held)
    torch.testing.assert_close(found[0], query @ held.transpose(-2, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], weights @ held, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(few, "_serves", lambda *given: False)
    torch.testing.assert_close(few.compare(query, held), found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(few.blend(weights, held), found[1], rtol=1e-5, atol=1e-5)


@compiled
def test_a_value_of_weight_0_adds_nothing_whatever_it_holds():
    values = torch.tensor([[[[1.0, 2.0], [float("nan"), float("inf")], [3.0, 4.0]]]])
    assert few.blend(torch.tensor([[[[0.5, 0.0, 0.5]]]]), values).tolist() == [[[[2.0, 3.0]]]]


def test_what_others_serve():
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    assert not few._serves(query.double(), keys.double())
    assert not few._serves(torch.randn(2, 2, few._MOST + 1, 4), keys)
    assert not few._serves(torch.randn(2, 2, 0, 4), keys)
    assert not few._serves(query[:1], keys)
    assert not few._serves(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 0, 4))
    assert not few._serves(query.requires_grad_(), keys)
    assert few.compare(query, keys).requires_grad


def test_what_is_small_is_left_to_torch(monkeypatch):
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    monkeypatch.setattr(few, "_LEAST", keys.numel() + 1)
    assert not few._serves(query, keys)


@pytest.mark.parametrize("product", [few.compare, few.blend])
def test_shapes_that_do_not_fit_are_an_error(product):
    with pytest.raises(RuntimeError):
        product(torch.randn(1, 1, 1, 2), torch.randn(1, 1, 3, 64))


KINDS = [
    Fused("softmax"), Fused("topk", 3), Fused("topk", 0), Fused("sparsemax"), Fused("entmax15"),
    Fused("entmax", excess=0.3), Fused("entmax", excess=torch.tensor([0.2, 0.9]).view(2, 1, 1)),
]  # fmt: skip


@compiled
@pytest.mark.parametrize("transform", KINDS, ids=lambda fused: fused.kind)
@pytest.mark.parametrize("queries", [1, 3, 5, 8])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_one_call_is_that_in_three(transform, queries, masked):
    query, keys, values = torch.randn(3, 2, queries, 17), cache(3, 2, 40, 17)[:, :, :31], cache(3, 2, 31, 20)
    valid = torch.rand(3, 31) < 0.6 if masked else None
    if valid is not None:
        valid[1] = False
        keys[~valid[:, None, :].expand(-1, 2, -1)] = float("nan")
    assert few.serves(query, keys, values)
    found = few.attend(query, keys, values, scale=0.3, transform=transform, valid=valid)
    scores = (query.double() * 0.3) @ keys.double().transpose(-2, -1)
    mask = None if valid is None else valid[:, None, None, :]
    wanted = _rows.weigh(scores, mask, transform) @ values.double()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    if valid is not None:
        assert (found[1] == 0).all()


@compiled
def test_what_attention_in_one_call_serves():
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    assert few.serves(query, keys, keys)
    assert not few.serves(query, keys, keys[:, :, :5])
    assert not few.serves(query, keys[..., :3], keys)
    assert not few.serves(query, keys, keys.double())
    assert not few.serves(query.bfloat16(), keys.bfloat16(), keys.bfloat16())
    with native.off():
        assert not few.serves(query, keys, keys)
    keys.requires_grad_()
    assert not few.serves(query, keys, keys)
    with torch.no_grad():
        assert few.serves(query, keys, keys)
