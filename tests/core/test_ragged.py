"""Tokens without padding and in their places are the same tokens, compiled or not, forward and backward."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.core import native
from attnbench.core import ragged as module
from attnbench.core.ragged import Ragged

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
NEEDS_COMPILER = pytest.mark.skipif(
    native.load(module._SOURCE) is None, reason="no C++ compiler: torch operations serve"
)
COMPILED = [pytest.param(True, marks=NEEDS_COMPILER), False]


def ragged_of(valid: torch.Tensor) -> Ragged:
    ragged = Ragged.of(valid)
    assert ragged is not None
    return ragged


@settings(max_examples=80, deadline=None)
@given(st.data())
@pytest.mark.parametrize("compiled", COMPILED)
def test_every_token_stands_in_its_place(compiled, data):
    rows, length, heads, width = (data.draw(st.integers(1, most)) for most in (5, 7, 3, 5))
    cells = st.lists(st.booleans(), min_size=rows * length, max_size=rows * length)
    valid = torch.tensor(data.draw(cells.filter(lambda filled: not all(filled)))).view(rows, length)
    dtype = data.draw(st.sampled_from(DTYPES))
    count, before, behind = int(valid.sum()), data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    whole = before + heads * width + behind
    wide = torch.arange(1, 1 + count * whole).view(count, whole).to(dtype)
    tokens = wide[:, before : before + heads * width]
    wanted = torch.zeros(rows, length, heads, width, dtype=dtype)
    wanted[valid] = tokens.reshape(count, heads, width)
    ragged = ragged_of(valid)
    with nullcontext() if compiled else native.off():
        padded = ragged.pad(tokens, heads)
        back, turned = ragged.take(padded), ragged.take(wanted.transpose(1, 2))
    assert torch.equal(padded, wanted.transpose(1, 2))
    with native.off() if not compiled else nullcontext():
        parts = ragged.pad_parts(tokens, 1, heads)
        joined = ragged.take_parts(*parts)
    assert torch.equal(torch.cat(parts, 1), padded)
    assert torch.equal(joined, tokens)
    assert torch.equal(back, tokens)
    assert torch.equal(turned, tokens)


def test_without_padding_there_is_nothing_to_gain():
    assert Ragged.of(torch.ones(3, 2, dtype=torch.bool)) is None
    assert Ragged.of(torch.ones(0, 2, dtype=torch.bool)) is None
    assert Ragged.of(torch.zeros(3, 2, dtype=torch.bool, device="meta")) is None


def test_rows_of_padding_alone():
    ragged = ragged_of(torch.zeros(2, 3, dtype=torch.bool))
    padded = ragged.pad(torch.randn(0, 4), 2)
    assert torch.equal(padded, torch.zeros(2, 2, 3, 2))
    assert ragged.take(padded).shape == (0, 4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("compiled", COMPILED)
def test_gradients(compiled, threads):
    before, ragged = torch.get_num_threads(), ragged_of(torch.arange(4) < torch.tensor([3, 0, 4])[:, None])
    tokens = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    padded = torch.randn(3, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    torch.set_num_threads(threads)
    try:
        with native.off() if not compiled else nullcontext():
            for function, inputs in (
                (lambda x: ragged.pad_parts(x, 1, 2), (tokens,)),
                (lambda x: ragged.pad(x, 2), (tokens,)),
                (ragged.take_parts, (padded, padded.detach().transpose(2, 3).contiguous().transpose(2, 3) + 1)),
            ):
                assert torch.autograd.gradcheck(function, inputs)
                assert torch.autograd.gradgradcheck(function, inputs)
    finally:
        torch.set_num_threads(before)


@NEEDS_COMPILER
def test_the_compiled_path_is_taken(monkeypatch):
    called = []
    monkeypatch.setattr(module, "_call", lambda *given, real=module._call: called.append(1) or real(*given))
    ragged = ragged_of(torch.tensor([[True, False]]))
    tokens = torch.randn(1, 4, requires_grad=True)
    ragged.take(ragged.pad(tokens, 2)).backward(torch.randn(1, 4))
    assert len(called) == 4


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize(("attempt", "words"), [
    (lambda ragged: ragged.pad(torch.randn(2, 4)), r"3 tokens stand in this batch.*\(2, 4\)"),
    (lambda ragged: ragged.pad(torch.randn(3, 4), 3), "a multiple of 3"),
    (lambda ragged: ragged.pad_parts(torch.randn(3, 6), 2, 2), "a multiple of 4"),
    (lambda ragged: ragged.take(torch.randn(2, 1, 1, 4)), "2 rows of 2; given is"),
    (lambda ragged: ragged.take(torch.randn(1, 1, 2, 4)), "2 rows of 2; given is"),
    (lambda ragged: ragged.take_parts(torch.randn(2, 1, 2, 4), torch.randn(2, 1, 2, 3)), "these differ"),
    (lambda ragged: ragged.take_parts(torch.randn(2, 1, 2, 4), torch.randn(2, 1, 2, 4).double()), "these differ"),
])  # fmt: skip
def test_what_does_not_belong_to_the_batch_is_refused(compiled, attempt, words):
    ragged = ragged_of(torch.tensor([[True, True], [True, False]]))
    with nullcontext() if compiled else native.off(), pytest.raises(ValueError, match=words):
        attempt(ragged)


def test_places_lie_on_the_processor_whatever_the_default():
    with torch.device("meta"):
        ragged = ragged_of(torch.tensor([[True, False]], device="cpu"))
    assert ragged.token.device.type == ragged.at.device.type == "cpu"
    assert ragged.pad(torch.empty(1, 4, device="meta")).device.type == "meta"  # shapes alone, nothing is read


def test_an_upstream_gradient_that_repeats_one_number():
    ragged = ragged_of(torch.tensor([[True, False], [True, True]]))
    tokens = torch.randn(3, 4, requires_grad=True)
    ragged.pad(tokens, 2).sum().backward()
    assert torch.equal(tokens.grad, torch.ones(3, 4))
    padded = torch.randn(2, 2, 2, 2, requires_grad=True)
    ragged.take(padded).sum().backward()
    assert torch.equal(padded.grad, torch.tensor([[1.0, 0.0], [1.0, 1.0]])[:, None, :, None].expand(2, 2, 2, 2))
