from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.attention.catalog import build_transform
from attnbench.attention.modules.multihead import MultiHeadSpec
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.transforms.topk_oow import TopKOutOfWindowSpec, topk_oow
from attnbench.attention.types import Dims, Positions


def by_hand(row: list[float], valid: list[bool], keep: list[bool], k: int) -> list[float]:
    """A row of weights, by sorting in Python."""
    outside = [j for j in range(len(row)) if valid[j] and not keep[j]]
    best = sorted(outside, key=lambda j: -row[j])[:k]
    chosen = [j for j in outside if best and row[j] >= row[best[-1]]]
    chosen += [j for j in range(len(row)) if valid[j] and keep[j]]
    masses = {j: math.exp(row[j] - max(row[each] for each in chosen)) for j in chosen}
    return [masses.get(j, 0.0) / sum(masses.values()) if masses else 0.0 for j in range(len(row))]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_row_keeps_its_window_and_the_best_outside(data):
    length = data.draw(st.integers(1, 10))
    flags = st.lists(st.booleans(), min_size=length, max_size=length)
    row = data.draw(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), min_size=length, max_size=length))
    valid, keep, k = data.draw(flags), data.draw(flags), data.draw(st.integers(1, 12))
    found = topk_oow(torch.tensor(row), valid=torch.tensor(valid), keep=torch.tensor(keep), k=k)
    torch.testing.assert_close(found, torch.tensor(by_hand(row, valid, keep, k)), rtol=0, atol=1e-6)


def test_without_a_window_it_is_topk_and_with_all_in_it_softmax():
    scores, valid = torch.randn(3, 4, 9), torch.rand(3, 4, 9) < 0.8
    assert torch.equal(topk_oow(scores, valid=valid, k=3), build_transform("topk", k=3)(scores, valid=valid))
    everything = torch.ones(9, dtype=torch.bool)
    torch.testing.assert_close(topk_oow(scores, valid=valid, keep=everything, k=2), softmax(scores, valid=valid))
    torch.testing.assert_close(topk_oow(scores, valid=valid, keep=~everything, k=9), softmax(scores, valid=valid))


def test_gradients_are_those_of_softmax_over_what_is_kept():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6, 11, dtype=torch.float64, generator=generator, requires_grad=True)
    keep, grad = torch.rand(6, 11, generator=generator) < 0.3, torch.randn(6, 11, generator=generator).double()
    found = topk_oow(scores, keep=keep, k=2)
    (ours,) = torch.autograd.grad(found, scores, grad)
    wanted = scores.masked_fill(found.detach() == 0, -torch.inf).softmax(-1)
    (theirs,) = torch.autograd.grad(wanted, scores, grad)
    torch.testing.assert_close(ours, theirs.nan_to_num(0.0), rtol=0, atol=1e-12)


def test_a_spoilt_row_is_told_wherever_it_is_spoilt():
    keep = torch.tensor([True, False, False, False])
    for at in range(3):
        scores = torch.arange(8.0).view(2, 4)
        scores[0, at] = torch.nan
        found = topk_oow(scores, valid=torch.tensor([True, True, True, False]), keep=keep, k=1)
        assert found[0, :3].isnan().all()
        assert found[0, 3] == 0
        assert not found[1].isnan().any()


@pytest.mark.parametrize(("n", "window", "best"), [(1, 0, 1), (2, 1, 1), (3, 1, 2), (8, 4, 4)])
def test_half_of_n_is_the_window(n: int, window: int, best: int):
    spec = TopKOutOfWindowSpec(n=n)
    kept = spec.keep("encoder_self")
    assert (0 if kept is None else kept.model_dump()["n"]) == window
    site = Site(ScaledDotSpec(), FullSpec(), spec)
    torch.manual_seed(1)
    module = MultiHeadSpec().build(site, "decoder_self", 8, Dims(heads=2, query_width=8, key_width=8), 0.0).double()
    states = torch.randn(2, 20, 8, dtype=torch.float64)
    places = Positions(torch.arange(20), torch.arange(20))
    weights = module(states, module.memorize(states, None), places, need_weights=True).weights
    assert weights is not None
    counts = (weights > 0).sum(-1)
    assert torch.equal(counts, torch.arange(1, 21).clamp(max=n).expand_as(counts))
    near = torch.ones(20, 20).tril().triu(1 - window).bool() if window else torch.zeros(20, 20, dtype=torch.bool)
    assert (weights[..., near] > 0).all()


def test_what_cannot_be_is_told():
    with pytest.raises(ValueError, match="outside the window, not 0"):
        topk_oow(torch.zeros(2), k=0)
    with pytest.raises(ValueError, match="upper"):
        topk_oow(torch.zeros(2), k=1, upper=torch.ones(2))
    with pytest.raises(ValueError, match="give n or a budget"):
        build_transform("topk_oow")
