"""Convolutions made as products over windows are torch's, of rows and of sentences end to end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, pad

from attnbench.core import native
from attnbench.models import _windows
from attnbench.models._windows import Sentences


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def alike(found: Tensor, wanted: Tensor, given: tuple[Tensor, ...], near: float) -> None:
    """Values and gradients."""
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    upstream = draw(*wanted.shape, seed=9).to(wanted.dtype).detach()
    grads = [torch.autograd.grad(each, given, upstream) for each in (found, wanted)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)


@settings(max_examples=60, deadline=None)
@given(*(st.integers(1, most) for most in (4, 6, 5, 4, 5)))
def test_a_product_over_windows_is_a_convolution(rows, count, width, outputs, span):
    inputs, weight, bias = (
        draw(rows, count + span - 1, width),
        draw(outputs, width, span, seed=1),
        draw(outputs, seed=2),
    )
    found = _windows.convolve(inputs, weight, bias)
    wanted = conv1d(inputs.transpose(1, 2), weight, bias).transpose(1, 2)
    assert found.shape == (rows, count, outputs)
    alike(found, wanted, (inputs, weight, bias), 1e-12)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_are_made_of_what_is_asked_for(wanted):
    given = [draw(2, 6, 3), draw(4, 3, 3, seed=1), draw(4, seed=2)]
    whole = torch.autograd.grad(_windows.convolve(*given).sin().sum(), given)
    parts = [each if place in wanted else each.detach() for place, each in enumerate(given)]
    found = torch.autograd.grad(_windows.convolve(*parts).sin().sum(), [parts[place] for place in wanted])
    for place, each in zip(wanted, found, strict=True):
        assert torch.equal(each, whole[place])


def test_autocast_multiplies_in_its_type():
    inputs, weight, bias = (
        draw(*shape, seed=seed, dtype=torch.float32) for seed, shape in enumerate([(3, 8, 16), (10, 16, 3), (10,)])
    )
    with torch.autocast("cpu", torch.bfloat16):
        found = _windows.convolve(inputs, weight, bias)
        wanted = conv1d(inputs.transpose(1, 2), weight, bias).transpose(1, 2)
    assert found.dtype == wanted.dtype == torch.bfloat16
    alike(found, wanted, (inputs, weight, bias), 0.05)


def test_autocast_leaves_float64_alone():
    inputs, weight, bias = (draw(*shape, seed=1) for shape in [(3, 8, 16), (10, 16, 3), (10,)])
    with torch.autocast("cpu", torch.bfloat16):
        assert _windows.convolve(inputs, weight, bias).dtype == torch.float64
        for made in (_windows.convolve, lambda states, *given: conv1d(states.transpose(1, 2), *given)):
            with pytest.raises(RuntimeError):  # types that do not meet
                made(inputs.float(), weight, bias)


def test_windows_that_do_not_fit_are_an_error_and_no_rows_none():
    weight, bias = draw(4, 3, 3, seed=1), draw(4, seed=2)
    with pytest.raises(ValueError, match="window of 3 positions does not fit into 2"):
        _windows.convolve(draw(2, 2, 3), weight, bias)
    none = draw(0, 6, 3)
    found = torch.autograd.grad(_windows.convolve(none, weight, bias).sum(), (none, weight))
    assert found[0].shape == none.shape
    assert not found[1].any()


def test_there_is_no_second_derivative():
    given = draw(2, 6, 3), draw(4, 3, 3, seed=1), draw(4, seed=2)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(_windows.convolve(*given).sum(), given, create_graph=True)


def test_what_is_served():
    x = draw(2, 3)
    assert _windows.serves(1, x)
    with native.off():  # torch's convolution defines it
        assert not _windows.serves(1, x)
    assert not _windows.serves(1, x, torch.empty(2, device="meta"))
    with torch.no_grad():
        assert not _windows.serves(_windows.LEAST - 1, x)
        assert _windows.serves(_windows.LEAST, x)
    mapped: list[bool] = []
    torch.func.vmap(lambda row: mapped.append(_windows.serves(1, row)) or row)(x.detach())
    assert mapped == [False]


# ---- sentences end to end -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(lambda lengths: 0 < sum(lengths) < 6 * len(lengths)),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_each_sentence_is_convolved_by_itself(lengths, before, after):
    valid = torch.arange(6) < torch.tensor(lengths)[:, None]
    sentences, span = Sentences.of(valid, (before, after)), before + after + 1
    assert sentences is not None
    assert sentences.rows().tolist() == [row for row, length in enumerate(lengths) for _ in range(length)]
    states, weight, bias = draw(len(lengths), 6, 3), draw(4, 3, span, seed=1), draw(4, seed=2)
    tokens = pad(sentences.take(states), (0, 0, before, after))
    found = _windows.convolve(tokens[None], weight, bias, sentences.outside)[0]
    alone = [
        conv1d(pad(row[:length], (0, 0, before, after)).T[None], weight, bias)[0].T
        for row, length in zip(states, lengths, strict=True)
        if length
    ]
    alike(found, torch.cat(alone), (states, weight, bias), 1e-12)
    padded = sentences.pad(found)
    assert torch.equal(padded[valid], found)
    assert not padded[~valid].any()


@pytest.mark.parametrize("rows", [[[1, 1], [1, 1]], [[0, 0], [0, 0]], [[1, 0, 1], [1, 1, 1]], [[0, 1, 1], [1, 0, 0]]])
def test_other_padding_than_on_the_right_is_left_in_its_rows(rows):
    assert Sentences.of(torch.tensor(rows).bool(), (1, 1)) is None


def test_what_lies_outside_is_told_by_its_place():
    sentences = Sentences.of(torch.tensor([[1, 0], [1, 1]]).bool(), (1, 0))
    assert sentences is not None
    assert sentences.outside.tolist() == [0, 2]
