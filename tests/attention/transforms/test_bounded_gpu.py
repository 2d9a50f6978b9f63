"""The Triton kernels of csoftmax and csparsemax give what torch operations give, as Triton's interpreter runs them.

With TRITON_INTERPRET=0 the same tests run on the GPU itself.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms import _bounded, _bounded_gpu
from attnbench.attention.transforms.csoftmax import CSOFTMAX
from attnbench.attention.transforms.csparsemax import CSPARSEMAX
from attnbench.core import native
from attnbench.core.kernels import installed, interpreted

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    pytest.mark.skipif(
        not interpreted() and not torch.cuda.is_available(), reason="TRITON_INTERPRET is off and there is no GPU"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, for what is not looked at
]
DEVICE = "cpu" if interpreted() else "cuda"
KINDS = {"csoftmax": CSOFTMAX, "csparsemax": CSPARSEMAX}
EACH = pytest.mark.parametrize("kind", KINDS)
NAN, INF = float("nan"), float("inf")


def by_kernels(kind, scores, upper, valid, grad):
    """Weights, and the gradients at scores and bounds; then the rows whose bounds sum to less than 1."""
    given = [None if each is None else each.to(DEVICE) for each in (scores.float(), valid, upper.float())]
    weights, bounds, short = _bounded_gpu.solve(kind, *given)
    slopes = _bounded_gpu.vjp(kind, weights, bounds, grad.float().to(DEVICE), short)
    return [each.cpu() for each in (weights, *slopes)], short.cpu()


def as_defined(kind, scores, upper, valid, grad):
    """The same of the same numbers in float64, in torch operations."""
    inputs = [each.float().double().requires_grad_() for each in (scores, upper)]
    with native.off():
        weights = build_transform(kind, on_infeasible="saturate")(inputs[0], valid=valid, upper=inputs[1])
        return [weights.detach(), *torch.autograd.grad(weights, inputs, grad.double())]


def drawn(seed, rows, keys, scale, least=1.01, most=4.0):
    """Scores, bounds that sum to so much, a mask, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    scores, grad = (torch.randn(rows, keys, generator=generator) for _ in range(2))
    valid = torch.rand(rows, keys, generator=generator) > 0.2
    valid[:, 0] = True
    upper = torch.rand(rows, keys, generator=generator) + 0.05
    upper *= torch.rand(rows, keys, generator=generator) > 0.1
    upper[:, 0] += 0.1
    total = least + (most - least) * torch.rand(rows, 1, generator=generator)
    return scale * scores, upper / (upper * valid).sum(-1, keepdim=True) * total, valid, grad


def agree(kind, scores, upper, valid, grad, tolerance=2e-6):
    found, short = by_kernels(kind, scores, upper, valid, grad)
    wanted = as_defined(kind, scores, upper, valid, grad)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=0, atol=tolerance, equal_nan=True)
    # gradients jump where a key changes sides, which a last digit decides
    sides = [torch.stack([w > 0, w < upper.float()]) for w in (found[0], wanted[0].float())]
    same = (sides[0] == sides[1]).all(0).all(-1) & ~wanted[0].isnan().any(-1)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine[same].double(), theirs[same], rtol=1e-4, atol=1e-4)
    return found, short, same


@EACH
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31), rows=st.integers(1, 40), keys=st.integers(1, 40),
    scale=st.sampled_from([0.0, 0.3, 2.0, 30.0, 1e4]), masked=st.booleans(),
    least=st.sampled_from([1.00001, 1.01, 3.0]),
)  # fmt: skip
def test_weights_and_gradients_are_those_of_the_definition(kind, seed, rows, keys, scale, masked, least):
    scores, upper, valid, grad = drawn(seed, rows, keys, scale, least)
    agree(kind, scores, upper, valid if masked else None, grad, 2e-6 if scale < 100 else 1e-5)


@EACH
def test_most_rows_are_compared_in_their_gradients_too(kind):
    *_, same = agree(kind, *drawn(3, 200, 25, 2.0))
    assert same.float().mean() > 0.95


@EACH
def test_long_rows(kind):
    agree(kind, *drawn(4, 3, 3000, 3.0, 1.5, 40.0))


@EACH
def test_rows_out_of_the_ordinary(kind):
    scores, upper, valid, grad = drawn(1, 10, 5, 1.0)
    valid[:] = True
    valid[8] = False
    scores[1, 2] = NAN
    scores[3, 0] = INF
    upper[5] = 0.1  # too little
    upper[6] = 0.2  # just enough
    scores[7] = -INF
    upper[9] = 0.0
    found, short, _ = agree(kind, scores, upper, valid, grad)
    wanted = torch.zeros(10, dtype=torch.bool)
    wanted[5] = wanted[9] = True
    assert torch.equal(short, wanted)
    assert found[0][[1, 3]].isnan().all()
    for each in found:
        assert not each[[7, 8]].any()


@EACH
def test_hidden_keys_hide_what_they_hold(kind):
    scores, upper, valid, grad = drawn(2, 30, 12, 2.0)
    clean = agree(kind, scores, upper, valid, grad.masked_fill(~valid, 0.0))[0]
    for held in (NAN, INF, 7.0):
        found, _ = by_kernels(kind, scores.masked_fill(~valid, held), upper, valid, grad.masked_fill(~valid, held))
        for mine, theirs in zip(found, clean, strict=True):
            assert torch.equal(mine, theirs)
            assert not mine[~valid].any()


@EACH
def test_loose_bounds_bind_nothing(kind):
    scores, _, valid, grad = drawn(5, 30, 12, 2.0)
    found, _ = by_kernels(kind, scores, torch.full_like(scores, 1e9), valid, grad)
    other = build_transform(kind[1:])(scores, valid=valid)
    torch.testing.assert_close(found[0], other, rtol=0, atol=2e-6)


@pytest.mark.skipif(interpreted(), reason="kernels are interpreted (TRITON_INTERPRET=0 compiles them)")
@EACH
def test_on_a_gpu_kernels_serve_and_say_what_is_wrong(kind):
    scores, upper, valid, _ = (each.cuda() for each in drawn(6, 30, 12, 2.0))
    assert _bounded_gpu.serves(scores, upper)
    found = build_transform(kind)(scores, valid=valid, upper=upper)
    assert bool((found <= upper).all())
    with pytest.raises(ValueError, match="sum to less than 1"):
        build_transform(kind)(scores, valid=valid, upper=upper / 100)
    saturated = build_transform(kind, on_infeasible="saturate")(scores, valid=valid, upper=upper / 100)
    torch.testing.assert_close(saturated, (upper / 100).masked_fill(~valid, 0.0))
    assert _bounded.FEASIBLE == 1e-6


@EACH
@pytest.mark.parametrize("total", [1.0000012, 1.000002, 1.00002, 1.0005])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_key_stays_free_where_bounds_leave_one(kind, total, scale):
    scores, upper, valid, grad = drawn(7, 200, 7, scale, total, total)
    valid[:] = True
    upper = upper / upper.sum(-1, keepdim=True) * total
    (weights, _, to_upper), _ = by_kernels(kind, scores, upper, valid, grad)
    exact, _, wanted = as_defined(kind, scores, upper, valid, grad)
    free, should = (((each > 0) & (each < upper.to(each.dtype))).any(-1) for each in (weights, exact.float()))
    assert torch.equal(free, should)
    torch.testing.assert_close(to_upper.double(), wanted, rtol=0, atol=1e-3)
    scores = torch.tensor([[1.0, 5.0, -3.0, 2.0]])
    upper = torch.tensor([[0.25, 0.25, 0.25, 0.2500012]])
    grad = torch.tensor([[0.1, -0.2, 0.7, 0.3]])
    found, _ = by_kernels(kind, scores, upper, None, grad)
    torch.testing.assert_close(found[2].double(), as_defined(kind, scores, upper, None, grad)[2], rtol=0, atol=1e-5)


@EACH
@pytest.mark.parametrize("strange", [NAN, INF, -INF])
def test_gradients_that_are_no_numbers_are_seen_where_there_is_weight(kind, strange):
    scores, upper = torch.tensor([[1.0, 2.0, 0.0, -1.0]]), torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    for place, seen in ((0, True), (2, False)):
        grad = torch.ones(1, 4)
        grad[0, place] = strange
        found, _ = by_kernels(kind, scores, upper, None, grad)
        for each in found[1:]:
            assert bool(each.isnan().any()) == seen
            assert not each[0, 2:].any()


@EACH
@pytest.mark.parametrize("wrong", [NAN, -0.1])
def test_a_bound_that_is_none_spoils_its_row(kind, wrong):
    scores, upper, valid, grad = drawn(8, 3, 5, 1.0)
    valid[:] = True
    upper[1, 2] = wrong
    (weights, *_), _ = by_kernels(kind, scores, upper, valid, grad)
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


@EACH
def test_however_far_apart_scores_lie_rows_sum_to_one(kind):
    scores, upper, valid, grad = drawn(9, 50, 9, 1e30)
    (weights, *_), _ = by_kernels(kind, scores, upper, valid, grad)
    torch.testing.assert_close(weights.sum(-1), torch.ones(50), rtol=0, atol=1e-5)


@EACH
def test_negated_views_are_read_as_what_they_are(kind):
    scores, upper, valid, grad = drawn(10, 4, 7, 2.0)
    made = [by_kernels(kind, negate(scores), upper, valid, grad)[0] for negate in (torch._neg_view, torch.neg)]
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)
