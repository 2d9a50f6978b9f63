"""Products of queries with the keys that they list are those of keys that are gathered first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.attention.backends import sampled
from attnbench.core import native

compiled = pytest.mark.skipif(
    not sampled.serves(torch.zeros(1, 1, 1, 1)), reason="there is no C++ compiler, or it is switched off"
)


def gathered(held, listed):
    """`[B, H, Q, n, E]`"""
    rows, heads = held.shape[:2]
    at = listed.expand(rows, heads, -1, -1)
    row, head = torch.arange(rows).view(-1, 1, 1, 1), torch.arange(heads).view(1, -1, 1, 1)
    return held[row, head, at]


def attend(query, keys, values, listed, first, compare, blend):
    """A nonlinear function of both products, that all gradients are asked for."""
    scores, of_all = compare(query, keys, listed, first)
    return blend(scores.sin(), of_all.cos(), values, listed)


def plain_compare(query, keys, listed, first):
    return (gathered(keys, listed) @ query[..., None]).squeeze(-1), query[:, :, :first] @ keys.mT


def plain_blend(weights, of_all, values, listed):
    context = (weights[..., None, :] @ gathered(values, listed)).squeeze(-2)
    return torch.cat([of_all @ values, context[:, :, of_all.shape[2] :]], 2)


@compiled
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_it_equals_gathered_keys(data):
    rows, heads, queries, held = (data.draw(st.integers(1, most)) for most in (3, 3, 40, 30))
    width, other, n = (data.draw(st.integers(1, most)) for most in (70, 70, 20))
    first = data.draw(st.integers(0, min(3, queries)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    listed = torch.randint(
        held, (data.draw(st.sampled_from([1, rows])), data.draw(st.sampled_from([1, heads])), queries, n),
        generator=generator, dtype=torch.int32,
    )  # fmt: skip
    shapes = (rows, heads, queries, width), (rows, heads, held, width), (rows, heads, held, other)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    if data.draw(st.booleans(), label="heads last"):  # as a projection leaves them
        inputs = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in inputs]
    found = []
    for dtype, compare, blend in (
        (torch.float32, sampled.compare, sampled.blend),
        (torch.float64, plain_compare, plain_blend),
    ):
        given_ = [each.to(dtype).requires_grad_() for each in inputs]
        context = attend(*given_, listed, first, compare, blend)
        found.append([context, *torch.autograd.grad(context.square().sum(), given_)])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(
            ours.double(), wanted, rtol=1e-4, atol=1e-4 * (1 + float(wanted.detach().abs().max()))
        )


@compiled
@pytest.mark.parametrize(
    "lie", [lambda each: each.mT.contiguous().mT, lambda each: each.as_strided((2, 1, 6, 3), (18, 7, 3, 1))]
)
def test_weights_may_lie_in_any_order(lie):
    generator = torch.Generator().manual_seed(0)
    weights, values = torch.randn(2, 1, 6, 3, generator=generator), torch.randn(2, 1, 6, 5, generator=generator)
    listed = torch.randint(6, (1, 1, 6, 3), generator=generator, dtype=torch.int32)
    of_all, found = torch.randn(2, 1, 2, 6, generator=generator), []
    for given_ in (lie(weights), weights):
        given_, values = given_.requires_grad_(), values.detach().requires_grad_()
        context = sampled.blend(given_, of_all, values, listed)
        found.append([context, *torch.autograd.grad(context.square().sum(), (given_, values))])
    for ours, wanted in zip(*found, strict=True):
        assert torch.equal(ours, wanted)


@compiled
def test_what_has_no_weight_is_not_read():
    values, listed = torch.full((1, 1, 3, 20), torch.nan), torch.tensor([[[[0, 2], [2, 1]]]]).int()
    values[0, 0, 2] = torch.arange(20.0)
    weights = torch.tensor([[[[0.0, 2.0], [1.0, 0.0]]]])
    context = sampled.blend(weights, torch.zeros(1, 1, 0, 3), values, listed)
    assert torch.equal(context, torch.stack([values[0, 0, 2] * 2, values[0, 0, 2]])[None, None])


@compiled
@pytest.mark.parametrize("listed", [-1, 3])
def test_a_key_that_there_is_not_is_refused(listed):
    states = torch.ones(1, 1, 3, 4)
    with pytest.raises(IndexError, match="beyond the 3 that there are"):
        sampled.compare(states, states, torch.full((1, 1, 3, 1), listed, dtype=torch.int32))


@compiled
@pytest.mark.parametrize(
    "listed", [torch.zeros(1, 1, 2, 1).int(), torch.zeros(1, 1, 3, 1).long(), torch.zeros(1, 1, 3, 1).int().to("meta")]
)
def test_lists_that_compiled_code_cannot_read_are_refused(listed):
    states = torch.ones(1, 1, 3, 4)
    with pytest.raises(ValueError, match="give int32 on a processor"):
        sampled.compare(states, states, listed)


@compiled
def test_weights_of_other_lists_are_refused():
    states = torch.ones(1, 1, 3, 4)
    with pytest.raises(ValueError, match="do not fit"):
        sampled.blend(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 0, 3), states, torch.zeros(1, 1, 3, 5).int())


@compiled
def test_low_precision_is_brought_to_float32():
    states = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    listed = torch.tensor([[[[0, 1], [1, 2], [2, 3], [3, 4], [4, 0]]]]).int()
    scores, _ = sampled.compare(states, states, listed)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, plain_compare(states.float(), states.float(), listed, 0)[0])
    assert torch.autograd.grad(scores.sum(), states)[0].dtype == torch.bfloat16


@compiled
def test_a_second_derivative_is_refused():
    states = torch.ones(1, 1, 3, 4, requires_grad=True)
    scores, _ = sampled.compare(states, states, torch.zeros(1, 1, 3, 1).int())
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(scores.sum(), states, create_graph=True)


def test_it_serves_float32_of_a_processor_where_there_is_a_compiler():
    states = torch.ones(1, 1, 3, 4)
    assert not sampled.serves(states.double())
    assert not sampled.serves(states.to("meta"))
    assert not sampled.serves(states[:, :, :0])
    with native.off():
        assert not sampled.serves(states)
