from __future__ import annotations

import math
from contextlib import nullcontext

import entmax as peer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.optimize import brentq

from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms._entmax import _second_order, alpha_gradient
from attnbench.attention.transforms.entmax import EntmaxSpec, LearnedEntmax, entmax
from attnbench.attention.transforms.entmax15 import entmax15
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.transforms.sparsemax import sparsemax
from attnbench.attention.types import Dims
from attnbench.core import native


def learned(raw: list[float], dtype: torch.dtype = torch.float64) -> LearnedEntmax:
    module = LearnedEntmax(len(raw)).to(dtype)
    module.raw.data = torch.tensor(raw, dtype=dtype)
    return module


def draw(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def by_root_finding(row: list[float], alpha: float) -> list[float]:
    scaled = [(alpha - 1) * z for z in row]
    power, top = 1 / (alpha - 1), max(scaled)
    tau = brentq(lambda t: sum(max(x - t, 0) ** power for x in scaled) - 1, top - 1 - 1e-9, top, xtol=1e-15, rtol=1e-15)
    return [max(x - tau, 0) ** power for x in scaled]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("keys", [40, 120, 1000, 5000])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.75, 1.9, 2.0, 2.5])
def test_keys_that_hardly_reach_the_threshold_weigh_hardly_anything(alpha, keys, compiled, hardly_reaching):
    transform = sparsemax if alpha == 2 else build_transform("entmax", alpha=alpha)
    scores = hardly_reaching(keys, alpha - 1)
    with nullcontext() if compiled else native.off():
        found = transform(scores)
    torch.testing.assert_close(found.double(), transform(scores.double()), rtol=0, atol=3e-6)


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.7, 2.0])
def test_equals_the_entmax_package(case, agree, alpha):
    def oracle(z):
        return peer.entmax_bisect(z, alpha=alpha, dim=-1, n_iter=60)

    agree(lambda z, valid: entmax(z, valid=valid, alpha=alpha), oracle, case, 1e-7, kink=-1 if alpha <= 1.5 else 1e-7)


def test_alpha_above_two_equals_the_entmax_package(case):
    """Weights only: the slopes are without bound near the threshold."""
    found = entmax(case.scores, valid=case.valid, alpha=2.5)
    torch.testing.assert_close(found, peer.entmax_bisect(case.masked, alpha=2.5, dim=-1, n_iter=80), rtol=0, atol=1e-7)


def test_gradient_of_alpha_above_two_equals_finite_differences():
    scores = torch.tensor([[0.1, 0.0, -0.05, -0.02], [0.3, 0.28, 0.1, -3.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: entmax(z, alpha=2.5), (scores,), atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=10), st.floats(1.01, 3.0))
def test_equals_root_finding(row, alpha):
    found = entmax(torch.tensor(row, dtype=torch.float64), alpha=alpha)
    tolerance = 1e-8 if alpha <= 2 else 1e-6  # brentq's 1e-15 in tau is a root of it in the weights
    wanted = torch.tensor(by_root_finding(row, alpha), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


def test_corners_are_the_exact_transforms():
    scores = draw(4, 6)
    for alpha, exact in ((1.0, softmax), (1 + 1e-4, softmax), (1.5, entmax15), (2.0, sparsemax)):
        assert torch.equal(entmax(scores, alpha=alpha), exact(scores))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("excess", [1.01e-4, 1e-3, 1e-2])
def test_just_above_one_no_digits_are_lost(dtype, excess):
    """p = [1 + e (d - t)]^(1/e) is softmax plus e times the alpha gradient at 1, to first order."""
    scores = draw(5, 8)
    alpha = 1 + excess
    found = entmax(scores.to(dtype), alpha=alpha).double()
    exact = torch.tensor([by_root_finding(row.tolist(), alpha) for row in scores], dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("alpha", [0.99, 0.0, -1.0, float("inf"), float("nan")])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha"):
        entmax(torch.zeros(2, 2), alpha=alpha)
    with pytest.raises(ValidationError, match="finite number from 1 on"):
        EntmaxSpec(alpha=alpha)


@pytest.mark.parametrize("argument", ["keep", "upper"])
@pytest.mark.parametrize("alpha", [1.0, 1.7, "learned"])
def test_refuses(argument, alpha):
    with pytest.raises(ValueError, match=f"takes no '{argument}'"):
        EntmaxSpec(alpha=alpha).build(Dims())(torch.zeros(2, 2), **{argument: torch.ones(2, dtype=torch.bool)})


class TestLearned:
    def test_starts_at_one_and_a_half_with_one_alpha_a_head(self):
        module = EntmaxSpec(alpha="learned").build(Dims(heads=3))
        assert isinstance(module, LearnedEntmax)
        assert [tuple(parameter.shape) for parameter in module.parameters()] == [(3,)]
        assert module.alpha.tolist() == [1.5, 1.5, 1.5]
        scores = draw(2, 3, 4, 6)
        torch.testing.assert_close(module(scores), entmax15(scores), rtol=0, atol=1e-12)

    def test_each_head_has_its_own_alpha(self):
        raw = [-2.0, 0.3, 2.0]
        scores = draw(2, 3, 4, 6)
        found = learned(raw)(scores)
        for head, value in enumerate(raw):
            alpha = 1 + torch.sigmoid(torch.tensor(value, dtype=torch.float64)).item()
            torch.testing.assert_close(found[:, head], entmax(scores[:, head], alpha=alpha), rtol=0, atol=1e-12)

    def test_values_and_gradients_equal_the_entmax_package(self):
        module, scores, upstream = (
            learned([-1.0, 0.0, 1.5]),
            draw(2, 3, 4, 9).requires_grad_(),
            draw(2, 3, 4, 9, seed=1),
        )
        module(scores).backward(upstream)
        raw, twin = module.raw.detach().clone().requires_grad_(), scores.detach().clone().requires_grad_()
        alpha = (1 + torch.sigmoid(raw)).view(1, -1, 1, 1)
        peer.entmax_bisect(twin, alpha=alpha, dim=-1, n_iter=60).backward(upstream)
        torch.testing.assert_close(module.raw.grad, raw.grad, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(scores.grad, twin.grad, rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize("raw", [-8.0, -5.0, -1.0, 0.0, 2.0])
    def test_alpha_gradient_equals_finite_differences(self, raw):
        scores, upstream, step = draw(3, 2, 5, 7), draw(3, 2, 5, 7, seed=1), 1e-5
        module = learned([raw, 0.5])
        module(scores).backward(upstream)

        def loss(value: float) -> float:
            return (learned([value, 0.5])(scores) * upstream).sum().item()

        wanted = (loss(raw + step) - loss(raw - step)) / (2 * step)
        assert module.raw.grad is not None
        assert module.raw.grad[0].item() == pytest.approx(wanted, rel=1e-5, abs=1e-9)

    def test_alpha_gradient_equals_the_printed_formula_and_its_limit(self):
        weights, grad = torch.softmax(draw(4, 6), -1), draw(4, 6, seed=1)
        for excess in (0.3, 0.9):
            powered = weights ** (1 - excess)
            share, log = powered / powered.sum(-1, keepdim=True), weights.log()
            entropy = (weights * log).sum(-1, keepdim=True)
            slope = (weights - share) / excess**2 - (weights * log - share * entropy) / excess
            found = alpha_gradient(grad, weights, torch.tensor(excess, dtype=torch.float64))
            torch.testing.assert_close(found[:, 0], (grad * slope).sum(-1), rtol=1e-10, atol=1e-12)
        log_square = weights.log().square()
        limit = -0.5 * weights * (log_square - (weights * log_square).sum(-1, keepdim=True))
        for excess in (0.0, 1e-9):
            found = alpha_gradient(grad, weights, torch.tensor(excess, dtype=torch.float64))
            torch.testing.assert_close(found[:, 0], (grad * limit).sum(-1), rtol=1e-6, atol=1e-9)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_second_order_remainder_joins_its_series(self, dtype):
        x = torch.tensor([0.0, 1e-12, 1e-3, 0.25, 0.4999, 0.5, 0.5001, 3.0, 60.0], dtype=dtype)
        wide = x.double()
        exact = torch.where(wide < 1e-2, 0.5 + wide / 6 + wide**2 / 24 + wide**3 / 120, (wide.expm1() - wide) / wide**2)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-11
        torch.testing.assert_close(_second_order(x).double(), exact, rtol=tolerance, atol=0)

    def test_float32_alpha_gradient_near_one_is_as_good_as_float64(self):
        """The printed formula loses every digit there."""
        scores, upstream = draw(4, 1, 5, 8), draw(4, 1, 5, 8, seed=1)
        for raw in (-6.0, -7.5, -9.0):
            wide, narrow = learned([raw]), learned([raw], torch.float32)
            wide(scores).backward(upstream)
            narrow(scores.float()).backward(upstream.float())
            assert wide.raw.grad is not None
            assert narrow.raw.grad is not None
            assert narrow.raw.grad.item() == pytest.approx(wide.raw.grad.item(), rel=1e-3)

    def test_saturated_alphas_are_softmax_and_sparsemax(self):
        """-9.5 is an alpha of 1.000075, below which entmax is softmax."""
        scores = draw(2, 3, 3, 5).requires_grad_()
        module = learned([-100.0, 100.0, -9.5])
        weights = module(scores)
        torch.testing.assert_close(weights[:, 0], softmax(scores[:, 0]), rtol=0, atol=1e-12)
        torch.testing.assert_close(weights[:, 1], sparsemax(scores[:, 1]), rtol=0, atol=1e-12)
        torch.testing.assert_close(weights[:, 2], softmax(scores[:, 2]), rtol=0, atol=1e-12)
        weights.square().sum().backward()
        assert module.raw.grad is not None
        assert scores.grad is not None
        assert module.raw.grad.isfinite().all()
        twin = scores.detach().clone().requires_grad_()
        exact = [softmax(twin[:, 0]), sparsemax(twin[:, 1]), softmax(twin[:, 2])]
        torch.stack(exact, 1).square().sum().backward()
        torch.testing.assert_close(scores.grad, twin.grad, rtol=0, atol=1e-12)

    def test_only_alpha_needs_a_gradient(self):
        module = learned([0.0])
        module(draw(2, 1, 3, 5)).square().sum().backward()
        assert module.raw.grad is not None
        assert module.raw.grad.abs().item() > 0

    def test_masked_nan_reaches_neither_gradient(self):
        module, scores = learned([0.2, -0.4]), draw(2, 2, 3, 5)
        valid = torch.tensor([True, True, True, False, True])
        scores[..., 3] = torch.nan
        scores.requires_grad_()
        upstream = draw(2, 2, 3, 5, seed=1)
        upstream[..., 3] = torch.nan
        module(scores, valid=valid).backward(upstream)
        assert module.raw.grad is not None
        assert scores.grad is not None
        assert module.raw.grad.isfinite().all()
        assert torch.equal(scores.grad[..., 3], torch.zeros(2, 2, 3, dtype=torch.float64))

    @pytest.mark.parametrize("shape", [(4, 5), (2, 4, 3, 5)])
    def test_scores_of_other_heads_are_refused(self, shape):
        with pytest.raises(ValueError, match="needs scores"):
            LearnedEntmax(3)(torch.zeros(shape))

    def test_one_head_takes_any_leading_dimensions(self):
        for shape in ((5,), (3, 5), (2, 1, 3, 5)):
            assert LearnedEntmax(1)(torch.zeros(shape)).shape == shape

    def test_trains_towards_the_sparsity_that_pays(self):
        """Targets drawn at alpha 1.9: gradient descent on alpha alone finds it."""
        scores = draw(64, 1, 1, 6)
        target = entmax(scores, alpha=1.9)
        module = learned([-1.0])
        optimiser = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(150):
            optimiser.zero_grad()
            (module(scores) - target).square().sum().backward()
            optimiser.step()
        assert module.alpha.item() == pytest.approx(1.9, abs=0.01)


@pytest.mark.parametrize("alpha", [2.1, 2.5, 3.0, 4.0, 5.0])
def test_steep_weights_are_exact_in_single_precision(alpha):
    """Each is infinitely steep at its threshold, where a rounding of the score would show."""
    scores = torch.randn(500, 20, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        entmax(scores, alpha=alpha).double(), entmax(scores.double(), alpha=alpha), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("alpha", [2.5, 4.0, 6.0, 10.0])
@pytest.mark.parametrize("apart", [0.0, 1e-12, 1e-6])
def test_nearly_equal_scores_keep_their_digits(alpha, apart):
    """Their threshold lies K^-e below the largest: about 1e-15 for 50 keys at alpha = 10."""
    power = 1 / (alpha - 1)
    below = (alpha - 1) * apart * torch.arange(50, dtype=torch.float64)

    def weights(log: float) -> torch.Tensor:
        return (math.exp(log) - below).clamp(min=0) ** power

    root = brentq(lambda log: float(weights(log).sum()) - 1, -60, 0, xtol=1e-15)
    found = entmax(-apart * torch.arange(50, dtype=torch.float64), alpha=alpha)
    torch.testing.assert_close(found, weights(root), rtol=0, atol=1e-6)
