"""The compiled path of csoftmax and csparsemax gives what the torch operations give, and leaves them the rest."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms import _bounded, _bounded_rows
from attnbench.attention.transforms.csoftmax import CSOFTMAX
from attnbench.attention.transforms.csparsemax import CSPARSEMAX
from attnbench.core import native

KINDS = {"csoftmax": CSOFTMAX, "csparsemax": CSPARSEMAX}


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    if native.load(_bounded_rows._SOURCE) is None:
        pytest.skip("no C++ compiler: torch operations serve")


def drawn(seed, rows, keys, scale, dtype):
    """Scores, bounds that sum to 1.01 and more, a mask, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    scores, grad = (torch.randn(rows, keys, generator=generator, dtype=torch.float64) for _ in range(2))
    valid = torch.rand(rows, keys, generator=generator) > 0.2
    valid[:, 0] = True
    upper = torch.rand(rows, keys, generator=generator, dtype=torch.float64) + 0.05
    upper *= torch.rand(rows, keys, generator=generator) > 0.1
    upper[:, 0] += 0.1
    total = 1.01 + 3 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    upper = upper / (upper * valid).sum(-1, keepdim=True) * total
    return (scale * scores).to(dtype), upper.to(dtype), valid, grad.to(dtype)


def answers(kind, scores, upper, valid, grad):
    """Weights, and the gradients at scores and bounds: compiled, then in torch operations."""
    made = []
    for off in (False, True):
        inputs = scores.clone().requires_grad_(), upper.clone().requires_grad_()
        with native.off() if off else nullcontext():
            weights = build_transform(kind, on_infeasible="saturate")(inputs[0], valid=valid, upper=inputs[1])
            made.append((weights.detach(), *torch.autograd.grad(weights, inputs, grad)))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 70), st.sampled_from([0.3, 2.0, 10.0]), st.booleans())
def test_compiled_is_plain(kind, dtype, seed, rows, keys, scale, masked):
    scores, upper, valid, grad = drawn(seed, rows, keys, scale, dtype)
    compiled, plain = answers(kind, scores, upper, valid if masked else None, grad)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-11
    torch.testing.assert_close(compiled[0], plain[0], rtol=tolerance, atol=tolerance)
    # gradients jump where a key changes sides, which a last digit decides
    sides = [torch.stack([w > 0, w < upper]) for w in (compiled[0], plain[0])]
    same = (sides[0] == sides[1]).all(0).all(-1)
    for ours, theirs in zip(compiled[1:], plain[1:], strict=True):
        torch.testing.assert_close(ours[same], theirs[same], rtol=30 * tolerance, atol=30 * tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_several_threads_share_the_rows(kind):
    scores, upper, valid, grad = drawn(0, 700, 40, 2.0, torch.float32)
    alone, _ = answers(kind, scores, upper, valid, grad)
    torch.set_num_threads(3)
    try:
        together, _ = answers(kind, scores, upper, valid, grad)
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(alone, together, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_out_of_the_ordinary_are_left(kind):
    scores, upper, _, grad = drawn(1, 9, 5, 1.0, torch.float32)
    scores[1, 2] = torch.nan
    scores[3, 0] = torch.inf
    upper[5] = 0.1  # too little
    upper[6] = 0.2  # just enough
    scores[7] = -torch.inf
    solved = _bounded_rows.solve(kind, scores, None, upper)
    assert solved.left.tolist() == [1, 3, 5, 6, 7]
    compiled, plain = answers(kind, scores, upper, None, grad)
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_gradients_that_are_no_numbers(kind, strange):
    """Where a weight is 0 they count for nothing; elsewhere they are seen."""
    scores, upper, _, grad = drawn(2, 30, 7, 3.0, torch.float32)
    upper[4, 3] = 0
    spoilt = grad.clone()
    spoilt[::2, 3] = strange
    (weights, to_scores, to_upper), _ = answers(kind, scores, upper, None, spoilt)
    (_, *wanted), _ = answers(kind, scores, upper, None, torch.where(spoilt.isfinite(), grad, 0.0))
    off, free = weights[::2, 3] == 0, (weights[::2, 3] > 0) & (weights[::2, 3] < upper[::2, 3])
    assert bool(off.any())
    assert bool(free.any())
    assert torch.equal(to_scores[::2][off], wanted[0][::2][off])
    assert torch.equal(to_upper[::2][off], wanted[1][::2][off])
    assert not to_scores[::2, 3][free].isfinite().any()
    moves = ((weights > 0) & (weights < upper)).any(-1)[::2]
    assert not to_upper[::2, 3][~off & ~free & moves].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_upstream_gradient_that_is_a_negated_view_is_read_right(kind):
    scores, upper, _, grad = drawn(3, 9, 7, 1.0, torch.float32)
    solved = _bounded_rows.solve(kind, scores, None, upper)
    found, wanted = (
        _bounded_rows.vjp(kind, solved.weights, solved.upper, each, None, bounds_too=True)
        for each in (torch._neg_view(grad), -grad)
    )
    torch.testing.assert_close(found, wanted)


@settings(max_examples=30)
@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(0, 2**31))
def test_weights_that_are_no_numbers_are_left_to_torch(kind, seed):
    _, upper, _, grad = drawn(seed, 4, 6, 1.0, torch.float32)
    weights = torch.rand(4, 6)
    assert _bounded_rows.vjp(kind, weights, upper, grad, None, bounds_too=True) is not None
    weights[2, 4] = torch.nan
    assert _bounded_rows.vjp(kind, weights, upper, grad, None, bounds_too=False) is None


def test_what_it_serves():
    scores = torch.zeros(2, 3)
    assert _bounded_rows.serves(scores, scores.double())
    assert not _bounded_rows.serves(scores, scores.half())
    assert not _bounded_rows.serves(scores[:0])
    assert not _bounded_rows.serves(scores.to("meta"))
    with native.off():
        assert not _bounded_rows.serves(scores)
    assert _bounded.MOST == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_another_default_device_changes_nothing(kind):
    transform = build_transform(kind)
    scores, upper = torch.randn(4, 8), torch.full((4, 8), 0.5)
    wanted = transform(scores, upper=upper)
    with torch.device("meta"):
        found = transform(scores, upper=upper)
    assert torch.equal(found, wanted)
