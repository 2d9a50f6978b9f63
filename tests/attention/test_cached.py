"""Products with a cache are those of matrices, read from any part of it."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention import cached
from attnbench.core import native
from attnbench.core.gathered import gathered

compiled = pytest.mark.usefixtures("_compiled")


@pytest.fixture(scope="module")
def _compiled():
    if native.load(cached._SOURCE) is None:
        pytest.skip("no C++ compiler: matrix products serve")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(cached, "_LEAST", 1)


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
    assert cached._serves(query, held)
    found = cached.compare(query, held), cached.blend(weights, held)
    torch.testing.assert_close(found[0], query @ held.transpose(-2, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], weights @ held, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(cached, "_serves", lambda *given: False)
    torch.testing.assert_close(cached.compare(query, held), found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cached.blend(weights, held), found[1], rtol=1e-5, atol=1e-5)


@compiled
def test_a_cache_whose_positions_lie_side_by_side():
    query, weights, held = torch.randn(2, 3, 1, 17), torch.rand(2, 3, 1, 90), cache(2, 3, 17, 90).mT
    torch.testing.assert_close(cached.compare(query, held), query @ held.mT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cached.blend(weights, held), weights @ held, rtol=1e-5, atol=1e-5)


@compiled
def test_a_value_of_weight_0_adds_nothing_whatever_it_holds():
    values = torch.tensor([[[[1.0, 2.0], [float("nan"), float("inf")], [3.0, 4.0]]]])
    assert cached.blend(torch.tensor([[[[0.5, 0.0, 0.5]]]]), values).tolist() == [[[[2.0, 3.0]]]]


def test_what_others_serve():
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    assert not cached._serves(query.double(), keys.double())
    assert not cached._serves(torch.randn(2, 2, cached.MOST + 1, 4), keys)
    assert not cached._serves(torch.randn(2, 2, 0, 4), keys)
    assert not cached._serves(query[:1], keys)
    assert not cached._serves(torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 0, 4))
    assert not cached._serves(torch.randn(2, 2, 2, 4).requires_grad_(), keys)  # of which gradients are not measured
    assert cached.compare(query.requires_grad_(), keys).requires_grad


@compiled
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("frozen", [None, "asking", "held"])
def test_gradients_of_one_query_are_those_of_matrices(loop, frozen):
    torch.manual_seed(3)
    held = cache(3, 2, 9, 20)[:, :, :7].requires_grad_(frozen != "held")
    query, weights = torch.randn(3, 2, 1, 20), torch.rand(3, 2, 1, 7)
    for each in (query, weights):
        each.requires_grad_(frozen != "asking")
    assert cached._serves(query, held)
    assert cached._serves(weights, held)
    read = gathered(held) if loop else held
    found = cached.compare(query, read), cached.blend(weights, read)
    wanted = query @ held.mT, weights @ held
    upstream = [torch.randn_like(each) for each in wanted]
    upstream[1] = upstream[1][..., :1].expand_as(upstream[1])  # whose numbers do not lie side by side
    sought = [each for each in (query, weights, held) if each.requires_grad]
    slopes = (torch.autograd.grad(each, sought, upstream) for each in (found, wanted))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.parametrize("product", [cached.compare, cached.blend])
def test_gradients_are_made_where_native_is_off_by_then(product):
    asking, held = torch.randn(1, 1, 1, 5).requires_grad_(), cache(1, 1, 5, 5)
    made = product(asking, held).sum()
    with native.off():
        made.backward()
    (wanted,) = torch.autograd.grad((asking @ (held.mT if product is cached.compare else held)).sum(), asking)
    torch.testing.assert_close(asking.grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("product", [cached.compare, cached.blend])
def test_in_a_function_that_is_mapped_over_torch_serves(product):
    asking, held = torch.randn(1, 1, 1, 5).requires_grad_(), cache(1, 1, 5, 5)
    found = torch.func.vmap(lambda factor: product(asking, held) * factor)(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(found[1], 2 * product(asking, held), rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.parametrize("product", [cached.compare, cached.blend])
def test_products_have_no_second_derivative(product):
    held = cache(1, 1, 5, 5).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(product(torch.randn(1, 1, 1, 5), held).sum(), held, create_graph=True)


def test_what_is_small_is_left_to_torch(monkeypatch):
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    monkeypatch.setattr(cached, "_LEAST", keys.numel() + 1)
    assert not cached._serves(query, keys)


@pytest.mark.parametrize("product", [cached.compare, cached.blend])
def test_shapes_that_do_not_fit_are_an_error(product):
    with pytest.raises(RuntimeError):
        product(torch.randn(1, 1, 1, 2), torch.randn(1, 1, 3, 64))


@compiled
@pytest.mark.parametrize("queries", [1, 5])
@torch.no_grad()
def test_queries_lie_as_they_lie(queries):
    states, keys = torch.randn(3, queries, 4 * 17), cache(3, 4, 9, 17)
    split = states.unflatten(-1, (4, -1)).transpose(1, 2)
    for query in (split, split.contiguous(), split.mT.contiguous().mT, torch.stack([split, split], -1)[..., 0]):
        torch.testing.assert_close(cached.compare(query, keys), split @ keys.mT, rtol=1e-4, atol=1e-5)
