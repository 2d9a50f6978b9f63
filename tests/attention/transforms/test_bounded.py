"""csoftmax and csparsemax against root-finding (scipy) and a linear solve of the KKT system for the derivatives.

2,000 drawn rows instead of 60: `pytest --hypothesis-profile=thorough tests/attention/transforms/test_bounded.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import logsumexp
from torch import Tensor

from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms._bounded import FEASIBLE, Bounded
from attnbench.attention.transforms.csoftmax import CSOFTMAX
from attnbench.attention.transforms.csparsemax import CSPARSEMAX
from attnbench.core import native

NAMES = ("csoftmax", "csparsemax")
SOLVERS: dict[str, Bounded] = {"csoftmax": CSOFTMAX, "csparsemax": CSPARSEMAX}
TOLD = 1e-290
"""Smaller weights have few digits: nothing can be said of their logarithms."""


def solve(name: str, z: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Weights of one row of finite scores and positive bounds that leave a choice."""
    if name == "csparsemax":
        tau = brentq(lambda t: np.clip(z - t, 0, u).sum() - 1, (z - u).min() - 1, z.max(), xtol=1e-13, maxiter=500)
        return np.clip(z - tau, 0, u)
    low, high = min((z - np.log(u)).min(), logsumexp(z)) - 1, logsumexp(z) + 1
    c = brentq(lambda t: np.exp(np.minimum(np.log(u), z - t)).sum() - 1, low, high, xtol=1e-13, maxiter=500)
    return np.exp(np.minimum(np.log(u), z - c))


def derivatives(name: str, p: np.ndarray, u: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(dz, du) of g . p, from the KKT conditions: H dp + dc = dz on the free keys, dp = du at bounds, sum dp = 0."""
    to_z, to_u = np.zeros_like(p), np.zeros_like(p)
    free, full = (p > 1e-300) & (p < u), p >= u
    count = int(free.sum())
    if count:
        system = np.zeros((count + 1, count + 1))
        system[:count, :count] = np.diag(1 / p[free] if name == "csoftmax" else np.ones(count))
        system[count, :count] = system[:count, count] = 1
        adjoint = np.linalg.solve(system.T, np.append(g[free], 0.0))
        to_z[free] = adjoint[:count]
        to_u[full] = g[full] - adjoint[count]
    return to_z, to_u


def margins(name: str, z: np.ndarray, u: np.ndarray, p: np.ndarray) -> float:
    """How far the scores are from where a key changes sides; 0 where no weight has the digits to tell."""
    free = (p > 0) & (p < u)
    if not free.any():
        return np.inf
    exact = free & (p > TOLD)
    if not exact.any():
        return 0.0
    level = (z[exact] - (p[exact] if name == "csparsemax" else np.log(p[exact]))).mean()
    edges = [z - u - level, z - level] if name == "csparsemax" else [z - np.log(u) - level]
    return float(np.abs(np.concatenate(edges)).min())


class Rows(NamedTuple):
    scores: Tensor
    upper: Tensor
    valid: Tensor | None = None


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def bounds(seed: int, *shape: int, total: float) -> Tensor:
    """Bounds that sum to `total`."""
    raw = torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05
    return raw / raw.sum(-1, keepdim=True) * total


def _zeroed(upper: Tensor) -> Tensor:
    """Every other bound 0."""
    return torch.where(torch.arange(upper.shape[-1]) % 2 == 1, 0.0, upper)


MASK = torch.arange(12) % 3 != 1
CASES: dict[str, Callable[[], Rows]] = {
    "random": lambda: Rows(draw(0, 40, 9), bounds(1, 40, 9, total=3)),
    "loose": lambda: Rows(draw(2, 40, 9), torch.full((40, 9), 1.5, dtype=torch.float64)),
    "tight": lambda: Rows(draw(3, 40, 9), bounds(4, 40, 9, total=1.02)),
    "one bound": lambda: Rows(draw(5, 40, 9), torch.full((40, 9), 0.2, dtype=torch.float64)),
    "tied": lambda: Rows((draw(6, 40, 9) * 2).round() / 2, (bounds(7, 40, 9, total=3) * 8).ceil() / 8),
    "equal": lambda: Rows(torch.full((4, 9), 2.5, dtype=torch.float64), bounds(8, 4, 9, total=2)),
    "zero bounds": lambda: Rows(draw(9, 40, 9), _zeroed(bounds(10, 40, 9, total=4))),
    "sum of one": lambda: Rows(draw(11, 40, 9), bounds(12, 40, 9, total=1)),
    "masked": lambda: Rows(draw(13, 40, 12), bounds(14, 40, 12, total=4), MASK),
    "two keys": lambda: Rows(draw(15, 40, 2), bounds(16, 40, 2, total=1.3)),
    "one key": lambda: Rows(draw(17, 5, 1), torch.full((5, 1), 3.0, dtype=torch.float64)),
    "steep": lambda: Rows(draw(18, 40, 17, scale=10), bounds(19, 40, 17, total=2)),
    "huge": lambda: Rows(draw(20, 30, 33, scale=1e4), bounds(21, 30, 33, total=2)),
    "huge and tight": lambda: Rows(draw(22, 30, 33, scale=1e4), bounds(23, 30, 33, total=1.01)),
    "far from zero": lambda: Rows(draw(24, 30, 33) + 1e4, bounds(25, 30, 33, total=2)),
    "long": lambda: Rows(draw(26, 4, 2048), bounds(27, 4, 2048, total=1.5)),
    "long and steep": lambda: Rows(draw(28, 4, 2048, scale=20), bounds(29, 4, 2048, total=40)),
    "fertility": lambda: Rows(draw(30, 40, 15, scale=2), (3 - 4 * torch.rand(40, 15, dtype=torch.float64)).clamp(0)),
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=list(CASES))
def rows(request: pytest.FixtureRequest) -> Rows:
    return CASES[request.param]()


def pull(name: str, rows: Rows, grad: Tensor, **fields: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, and the gradients at scores and bounds."""
    scores, upper = rows.scores.clone().requires_grad_(), rows.upper.clone().requires_grad_()
    weights = build_transform(name, **fields)(scores, valid=rows.valid, upper=upper)
    weights.backward(grad)
    assert scores.grad is not None
    assert upper.grad is not None
    return weights.detach(), scores.grad, upper.grad


def compare(name: str, rows: Rows, tolerance: float = 1e-8) -> int:
    """Hold each row against the oracles; how many were far enough from kinks to compare derivatives."""
    grad = draw(99, *rows.scores.shape)
    weights, to_scores, to_upper = (each.numpy() for each in pull(name, rows, grad))
    alive = rows.upper > 0 if rows.valid is None else (rows.upper > 0) & rows.valid
    smooth = 0
    for row, some in enumerate(alive.numpy()):
        z, u, g = (each[row].numpy()[some] for each in (rows.scores, rows.upper, grad))
        wanted = u if u.sum() <= 1 + FEASIBLE else solve(name, z, u)
        np.testing.assert_allclose(weights[row][some], wanted, rtol=0, atol=tolerance)
        assert not weights[row][~some].any()
        check_kkt(name, z, u, weights[row][some])
        if margins(name, z, u, weights[row][some]) > 1e-6:
            smooth += 1
            dz, du = derivatives(name, weights[row][some], u, g)
            np.testing.assert_allclose(to_scores[row][some], dz, rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(to_upper[row][some], du, rtol=tolerance, atol=tolerance)
            assert not to_scores[row][~some].any()
            assert not to_upper[row][~some].any()
    return smooth


def check_kkt(name: str, z: np.ndarray, u: np.ndarray, p: np.ndarray, tolerance: float = 1e-8) -> None:
    assert abs(p.sum() - 1) < tolerance + FEASIBLE * (u.sum() <= 1 + FEASIBLE)
    assert (p >= 0).all()
    assert (p <= u).all()
    free, full = (p > 0) & (p < u), p >= u
    if not free.any():
        return
    with np.errstate(divide="ignore"):
        level = z - (p if name == "csparsemax" else np.log(p))
        room = z - (u if name == "csparsemax" else np.log(u))
    scale = tolerance * max(1.0, np.abs(z[free]).max())
    threshold = level[free][p[free].argmax()]
    if name == "csparsemax":
        assert np.ptp(level[free]) <= scale
        assert (z[p == 0] <= threshold + scale).all()
    else:
        exact = level[free & (p > TOLD)]
        if not exact.size:
            return
        assert np.ptp(exact) <= scale
    assert (room[full] >= threshold - scale).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_and_derivatives_equal_the_solution(name, rows, compiled):
    with nullcontext() if compiled else native.off():
        assert compare(name, rows) >= (0 if len(rows.scores) < 10 else len(rows.scores) // 4)


def test_the_fast_path_equals_the_exact_one(name, rows):
    """On the rows that it claims; and some claims are made, but for the rows that are beyond it."""
    how = SOLVERS[name]
    valid = torch.ones_like(rows.scores, dtype=torch.bool) if rows.valid is None else rows.valid
    upper = torch.where(valid, rows.upper.clamp(max=2), 0.0)
    chosen = upper.sum(-1) > 1 + FEASIBLE
    upper = upper[chosen]
    scores = rows.scores[chosen].masked_fill(upper == 0, -torch.inf)
    fast, left = how.fast(scores.clone(), upper.clone())
    exact = how.exact(scores.clone(), upper.clone())
    claimed = torch.ones(len(scores), dtype=torch.bool)
    claimed[left] = False
    torch.testing.assert_close(fast[claimed], exact[claimed], rtol=0, atol=1e-12)


def test_the_exact_path_alone_equals_the_solution(name, rows, monkeypatch):
    how = SOLVERS[name]
    everything = how._replace(fast=lambda scores, upper: (torch.empty_like(scores), torch.arange(len(scores))))
    monkeypatch.setattr(f"attnbench.attention.transforms.{name}.{name.upper()}", everything)
    with native.off():
        compare(name, rows)


@pytest.mark.parametrize("case", ["huge", "huge and tight", "far from zero", "long and steep", "fertility"])
def test_float32_is_within_1e_5_of_float64(name, case):
    rows = CASES[case]()
    narrow = Rows(rows.scores.float(), rows.upper.float())
    wide = Rows(narrow.scores.double(), narrow.upper.double())
    found = build_transform(name)(narrow.scores, upper=narrow.upper)
    wanted = build_transform(name)(wide.scores, upper=wide.upper)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


def test_gradients_equal_finite_differences(name):
    checked = 0
    for seed in range(20):
        scores, upper = draw(seed, 1, 5), bounds(seed + 50, 1, 5, total=1.7)
        weights = build_transform(name)(scores, upper=upper)
        if margins(name, scores[0].numpy(), upper[0].numpy(), weights[0].numpy()) > 1e-2:
            inputs = scores.requires_grad_(), upper.requires_grad_()
            assert torch.autograd.gradcheck(lambda z, u: build_transform(name)(z, upper=u), inputs)
            checked += 1
    assert checked >= 4


def test_bounds_that_bind_nothing_change_nothing(name):
    scores, valid = draw(3, 20, 8, scale=2), draw(4, 20, 8) > -0.5
    valid[0] = False
    plain = build_transform({"csoftmax": "softmax", "csparsemax": "sparsemax"}[name])(scores, valid=valid)
    for bound in (1.0, 7.0, torch.inf):
        found = build_transform(name)(scores, valid=valid, upper=torch.full((8,), bound, dtype=torch.float64))
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


def test_bounds_broadcast_and_their_gradient_is_summed(name):
    scores, grad = draw(5, 3, 4, 6), draw(6, 3, 4, 6)
    for shape in ((6,), (4, 6), (3, 1, 6), (3, 4, 6)):
        upper = bounds(7, *shape, total=2).requires_grad_()
        whole = upper.detach().expand(3, 4, 6).contiguous().requires_grad_()
        short, full = build_transform(name)(scores, upper=upper), build_transform(name)(scores, upper=whole)
        assert torch.equal(short, full)
        short.backward(grad)
        full.backward(grad)
        assert upper.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(upper.grad, whole.grad.sum_to_size(upper.shape), rtol=0, atol=1e-12)


def test_bounds_that_decide_all_have_no_gradient(name):
    upper = bounds(1, 4, 6, total=1)
    weights, to_scores, to_upper = pull(name, Rows(draw(2, 4, 6), upper), draw(3, 4, 6))
    torch.testing.assert_close(weights, upper, rtol=0, atol=1e-12)
    assert not to_scores.any()
    assert not to_upper.any()


@pytest.mark.parametrize("compiled", [True, False])
def test_infeasible_bounds_are_refused_or_taken(name, compiled):
    rows = Rows(
        draw(2, 3, 4), torch.tensor([[0.2, 0.3, 0.1, 0.1], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]).double()
    )
    with pytest.raises(ValueError, match=r"bounds of 2 rows sum to less than 1, the first to 0\.7"):
        build_transform(name)(rows.scores, upper=rows.upper)
    grad = draw(3, 3, 4)
    with nullcontext() if compiled else native.off():
        weights, to_scores, to_upper = pull(name, rows, grad, on_infeasible="saturate")
    assert torch.equal(weights[[0, 2]], rows.upper[[0, 2]])
    assert not to_scores[[0, 2]].any()
    assert torch.equal(to_upper[0], grad[0])
    torch.testing.assert_close(weights[1].sum(), torch.ones((), dtype=torch.float64))


def test_feasibility_counts_valid_keys_only(name):
    valid = torch.tensor([True, True, False])
    with pytest.raises(ValueError, match="less than 1"):
        build_transform(name)(draw(1, 2, 3), valid=valid, upper=torch.tensor([0.4, 0.4, 1.0]).double())
    scores = draw(1, 2, 3)
    scores[1, 0] = -torch.inf
    with pytest.raises(ValueError, match="bounds of 1 rows"):
        build_transform(name)(scores, upper=torch.tensor([0.4, 0.4, 0.4]).double())


def test_a_row_without_keys_needs_no_bounds(name):
    weights = build_transform(name)(draw(1, 2, 3), valid=torch.zeros(3, dtype=torch.bool), upper=torch.zeros(3))
    assert not weights.any()


@pytest.mark.parametrize("bound", [-0.1, float("nan"), -torch.inf])
def test_bad_bounds_are_refused(name, bound):
    with pytest.raises(ValueError, match="negative number or NaN"):
        build_transform(name)(draw(1, 2, 3), upper=torch.tensor([1.0, bound, 1.0]))


def test_missing_bounds_and_bad_shapes_are_refused(name):
    with pytest.raises(ValueError, match="needs 'upper'"):
        build_transform(name)(draw(1, 2, 3))
    with pytest.raises(ValueError, match="does not broadcast"):
        build_transform(name)(draw(1, 2, 3), upper=torch.ones(2))
    with pytest.raises(ValueError, match="takes no 'keep'"):
        build_transform(name)(draw(1, 2, 3), upper=torch.ones(3), keep=torch.ones(3, dtype=torch.bool))


def test_a_wide_range_of_scores_still_sums_to_one():
    """Where a running normaliser underflows."""
    scores = torch.tensor([[0.0, -200.0, -400.0, -800.0, 1200.0]], dtype=torch.float64)
    upper = torch.tensor([[0.3, 0.3, 0.3, 0.3, 0.3]], dtype=torch.float64)
    weights = build_transform("csoftmax")(scores, upper=upper)
    torch.testing.assert_close(
        weights, torch.tensor([[0.3, 0.3, 0.1, 0.0, 0.3]], dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_scores_as_low_as_numbers_go(name, dtype):
    """As a fill for what should be left out; where bounds ask for it, such keys share evenly all the same."""
    for fill in (-1e9, -1e18, torch.finfo(dtype).min):
        scores = torch.tensor([[fill, fill, fill, 3.0]], dtype=dtype)
        for bound, rest in ((0.6, 0.4 / 3), (0.35, 0.65 / 3), (0.25, 0.25)):
            weights = build_transform(name)(scores, upper=torch.full_like(scores, bound))
            wanted = torch.tensor([[rest, rest, rest, bound]], dtype=dtype)
            torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_scores_further_apart_than_the_largest_number(name):
    most = torch.finfo(torch.float32).max
    scores = torch.tensor([[0.7 * most, -0.7 * most, 0.0, 1.0], [-0.7 * most, 0.7 * most, most, 0.0]])
    weights = build_transform(name)(scores, upper=torch.ones(2, 4))
    assert torch.equal(weights, torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]))


def test_of_ties_the_smaller_bound_is_reached_first():
    scores, upper = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[0.1, 0.3, 1.0]], dtype=torch.float64)
    for each in NAMES:
        weights = build_transform(each)(scores, upper=upper)
        wanted = torch.tensor([[0.1, 0.3, 0.6]], dtype=torch.float64)
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-12)


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    length = draw(st.integers(1, 12))
    score = st.one_of(st.floats(-3, 3), st.floats(-1e4, 1e4), st.sampled_from([0.0, 1.0, -1.0, 0.5]))
    bound = st.one_of(st.floats(1e-3, 1), st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]))
    scores = draw(st.lists(score, min_size=length, max_size=length))
    upper = draw(st.lists(bound, min_size=length, max_size=length))
    valid = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    first = draw(st.integers(0, length - 1))
    valid[first] = True
    total = sum(u for u, v in zip(upper, valid, strict=True) if v)
    if total < 1:
        upper[first] += 1 - total + draw(st.sampled_from([0.0, 1e-3, 0.5]))
    as_rows = torch.tensor([scores], dtype=torch.float64), torch.tensor([upper], dtype=torch.float64)
    return Rows(*as_rows, torch.tensor(valid))


@given(rows=some_rows(), which=st.sampled_from(NAMES))
@example(  # the only key below its bound has a weight of few digits
    rows=Rows(torch.tensor([[6453.0, 5718.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64), None),
    which="csoftmax",
)
def test_any_row_with_any_bounds_equals_the_solution(rows, which):
    compare(which, rows)


@pytest.mark.parametrize("held", [np.nan, -1.0, np.inf])
@pytest.mark.parametrize("off", [False, True])
def test_a_masked_key_may_hold_any_bound(name: str, held: float, off: bool):
    rows = CASES["masked"]()
    grad = draw(99, *rows.scores.shape)
    assert rows.valid is not None
    with native.off() if off else nullcontext():
        wanted = pull(name, rows, grad)
        found = pull(name, rows._replace(upper=rows.upper.masked_fill(~rows.valid, held)), grad)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)
