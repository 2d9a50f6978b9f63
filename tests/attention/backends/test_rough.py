"""The kernels of entmax-1.5 in half precision equal the definition where a threshold from float16 would not do."""

from __future__ import annotations

import fused_laws as laws
import pytest
import torch
from fused_laws import TRANSFORMS, Watched, allowed, defined, drawing, given

from attnbench.attention.backends import fused

pytestmark = laws.NEEDED

ROUNDED = 2e-3
"""Of a length, at most, what rounding to float16 makes of contexts and gradients."""


def in_steps(states, step):
    """States in whole steps, so that no unit that adds up products in an order of its own rounds sums otherwise."""
    return (states / step).round() * step


def states_of(scores):
    """Query, keys and values in float16, of which all queries have the scores [K] at a scale of 1/8, and noise."""
    query, key, values = (each.detach() for each in given((1, 2, 70, scores.shape[0], 64, 16)))
    query, key = in_steps(1e-2 * query, 2**-4), in_steps(1e-2 * key, 2**-5)
    query[..., 0], key[..., 0] = 1.0, 8.0 * scores
    return [each.half().requires_grad_() for each in (query, key, values)]


def off(states, *, scale=0.125, valid=None, causal=False):
    """How far contexts and gradients lie from the definition in float32, as parts of their lengths; but for the first
    number of each state, which states_of makes large: sums of its multiples by gradients of both signs are rounding."""
    kernel, transform = TRANSFORMS["entmax15"]
    found = fused.attend(*states, kernel, scale=scale, valid=valid, causal=causal)
    upstream = torch.randn(found.shape, generator=drawing(9)).half()
    wide = [each.detach().float().requires_grad_() for each in states]
    wanted = defined(*wide, transform, scale, valid, causal)
    mine = (found.detach(), *torch.autograd.grad(found, states, upstream))
    theirs = (wanted.detach(), *torch.autograd.grad(wanted, wide, upstream.float()))
    return [float((a.float() - b)[..., 1:].norm() / b[..., 1:].norm()) for a, b in zip(mine, theirs, strict=True)]


def alone(states, *, scale=0.125):
    """The same of contexts of which no gradient is asked."""
    kernel, transform = TRANSFORMS["entmax15"]
    query, keys, values = (each.detach() for each in states)
    found = fused.attend(query, keys, values, kernel, scale=scale).float()
    wanted = defined(query.float(), keys.float(), values.float(), transform, scale, None, False)
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("queries", [70, 128])
@pytest.mark.parametrize("keys", [65, 128, 200, 320, 449])
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_blocks(queries, keys, causal):
    states = [each.detach().half().requires_grad_() for each in given((1, 2, queries, keys, 64, 64))]
    assert max(off(states, causal=causal and queries <= keys)) < ROUNDED


@pytest.mark.parametrize("first", [1, 64, 130])
def test_keys_that_are_looked_at_begin_later(first):
    states = [each.detach().half().requires_grad_() for each in given((1, 2, 70, 300, 64, 64))]
    assert max(off(states, valid=(torch.arange(300) >= first)[None])) < ROUNDED


@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
def test_scores_that_lie_near_each_other_or_far_apart(scale):
    """All keys have a weight, or few; the best lie nearby, or beyond what float16 tells apart."""
    states = [each.detach().half().requires_grad_() for each in given((1, 2, 70, 300, 64, 64))]
    assert max(off(states, scale=scale * 0.125)) < ROUNDED


@pytest.mark.parametrize("peak", [3.0, 20.0, 40.0, 3000.0])
def test_the_best_keys_are_not_in_the_first_block(peak):
    scores = torch.randn(300, generator=drawing(1)) * 0.3
    scores[200:210] += peak
    contexts, *gradients = off(states_of(scores))
    assert contexts < ROUNDED / 4
    assert max(gradients) < ROUNDED


@pytest.mark.parametrize("best", [1, 3, 8])
def test_a_thousand_keys_share_what_a_few_leave(best):
    """Block by block a little more, from nothing on, of which a step of Newton's method too few would lose a part."""
    query, keys, values = (torch.zeros(1, 1, rows, 16) for rows in (12 * 64, 2048, 2048))
    query[..., 0], query[..., 1] = 1.0, -2.0 / best**0.5 + torch.linspace(0.0, 0.06, 12).repeat_interleave(64)
    keys[..., :best, 0], keys[..., best:, 1], values[..., best:, 0] = 0.0, 1.0, 1.0
    query, keys, values = query.half(), keys.half(), values.half()
    kernel, transform = TRANSFORMS["entmax15"]
    wanted = defined(query.float(), keys.float(), values.float(), transform, 1.0, None, False)[..., 0]
    found = fused.attend(query, keys, values, kernel, scale=1.0)[..., 0].float()
    assert float(wanted.min()) < 1e-3
    assert float(wanted.max()) > 0.03
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("best", "more"), [(1, 0.01), (1, 0.05), (3, 0.02), (8, 0.01)])
def test_gradients_where_many_keys_that_are_all_known_share_a_little(best, more):
    """What rounding moves each of them by would count as often."""
    generator = drawing(0)
    query, keys, values = (torch.randn(1, 1, rows, 64, generator=generator) for rows in (64, 256, 256))
    query, keys = query * 0.05, keys * 0.05
    query[..., 0], keys[..., 0] = 1.0, 8.0 * (more - 2.0 / best**0.5)
    keys[..., :best, 0], values[..., :best, :] = 0.0, values[..., :best, :] + 1.0
    assert max(off([each.half().requires_grad_() for each in (query, keys, values)])) < ROUNDED


def test_scores_that_float16_rounds_one_way():
    scores = torch.full((300,), -1.0)
    scores[0], scores[200], scores[201:210] = 0.0, 28.0, 27.3046875
    query, keys, values = states_of(scores)
    with torch.no_grad():  # almost halfway to the next number
        query[..., 1], keys[..., 201:210, 1] = 1.0, 8.0 * 0.007
    assert max(off([query, keys, values])) < ROUNDED / 2


def test_thresholds_kept_for_backward_make_weights_that_sum_to_1():
    states = [in_steps(each.detach(), 2**-3).half().requires_grad_() for each in given((1, 2, 70, 448, 64, 64))]
    made = fused.attend(*states, TRANSFORMS["entmax15"][0], scale=0.125).grad_fn.saved_tensors
    threshold, most, inverse = made[8:11]
    scores = states[0].float() @ states[1].float().mT * 0.125
    sums = (1 + 0.5 * (scores - (most + threshold)[..., None])).clamp(min=0).square().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-4)
    torch.testing.assert_close(sums * inverse, torch.ones_like(sums), rtol=0, atol=1e-4)


def test_more_than_four_good_keys_of_one_class():
    scores = torch.randn(576, generator=drawing(1)) * 0.3
    scores[5::64] += 1.0
    assert max(off(states_of(scores))) < ROUNDED
    assert alone(states_of(scores)) < ROUNDED / 2


def test_many_keys_of_one_class_have_a_little_weight_each():
    """What one of them would move is little, what all do is not."""
    scores = torch.full((1024,), -3.0)
    scores[torch.tensor([20, 30, 40])], scores[5::64] = 0.0, -1.046
    assert max(off(states_of(scores))) < ROUNDED
    assert alone(states_of(scores)) < ROUNDED / 2


def test_gradients_where_one_class_holds_many_keys_whose_values_are_alike():
    """The mean under r of values, from which gradients are told, moves by as many as move."""
    scores = torch.full((2048,), -6.0)
    scores[5::64] = -1.02 + 0.02 * torch.rand(32, generator=drawing(1))
    scores[torch.tensor([20, 30, 40])] = 0.0
    query, keys, values = states_of(scores)
    with torch.no_grad():
        values[..., 1] = (scores > -1.02).half()
    assert max(off([query, keys, values])) < ROUNDED / 2


@pytest.mark.parametrize("scale", [-0.125, 0.0])
def test_scores_may_be_turned_about_or_all_be_equal(scale):
    states = [each.detach().half().requires_grad_() for each in given((1, 2, 70, 300, 64, 64))]
    contexts, *_, of_values = off(states, scale=scale)
    assert contexts < ROUNDED
    assert of_values < ROUNDED


@pytest.mark.parametrize(("spread", "hidden"), [(1.0, False), (0.3, False), (1e-3, False), (0.3, True)])
def test_values_are_mixed_again_for_rows_with_hidden_keys_alone(spread, hidden, monkeypatch):
    """Not where most keys have a weight, which costs less to find out before."""
    kernels, noted = fused.kernels(), []
    assert kernels is not None

    class Noted:
        thresholds = kernels.rough.thresholds

        class contexts:
            def __class_getitem__(cls, grid):
                def run(*given, **named):
                    if named["AGAIN"]:
                        noted.append(given[9].clone())
                    kernels.rough.contexts[grid](*given, **named)

                return run

    monkeypatch.setattr(fused, "kernels", lambda: kernels._replace(rough=Noted))
    scores = torch.randn(576, generator=drawing(1)) * spread
    if hidden:
        scores[5::64] += 1.0
    assert alone(states_of(scores)) < ROUNDED / 2
    assert bool(noted[0].any()) == hidden


def test_scores_of_some_millions_keep_their_digits():
    query, keys, values = (each.detach() for each in given((1, 1, 64, 200, 16, 16)))
    query, keys = in_steps(query, 1.0), in_steps(keys, 0.5)
    query[..., 0], keys[..., 0] = 2048.0, 2048.0  # 2^22, beside which a score has steps of a half
    states = [each.half().requires_grad_() for each in (query, keys, values)]
    assert off(states, scale=1.0)[0] < ROUNDED / 4


def test_an_infinite_value_leaves_others_be_and_is_no_nan():
    query, keys, values = (each.detach().half() for each in given((1, 1, 70, 200, 64, 16)))
    values[0, 0, 7, 3] = torch.inf
    found = fused.attend(query * 1e-2, keys, values, TRANSFORMS["entmax15"][0], scale=0.125)
    assert bool(found[..., 3].isinf().all())
    assert bool(found[..., :3].isfinite().all())


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_its_row_alone(strange):
    query, keys, values = (each.detach().half() for each in given((1, 1, 70, 200, 64, 16)))
    query[0, 0, 66, 3] = strange
    found = fused.attend(query, keys, values, TRANSFORMS["entmax15"][0], scale=0.125)
    assert found.isnan().any(-1).nonzero().tolist() == [[0, 0, 66]]


def test_rows_without_a_key_are_zero():
    states = [each.detach().half() for each in given((2, 1, 70, 200, 64, 16))]
    valid = torch.tensor([[True] * 200, [False] * 200])
    found = fused.attend(*states, TRANSFORMS["entmax15"][0], scale=0.125, valid=valid)
    assert bool(found[0].any())
    assert not bool(found[1].any())


def test_dropout_scales_what_it_keeps_and_backward_meets_the_same_draw():
    kernel, transform = TRANSFORMS["entmax15"]
    query, keys, values = (each.detach().half().requires_grad_() for each in given((1, 2, 70, 128, 64, 16)))

    def run(held):
        torch.manual_seed(3)
        return fused.attend(query, keys, held, kernel, scale=0.125, dropout=0.25)

    with torch.no_grad():
        dropped = run(torch.eye(128).half().expand(1, 2, 128, 128)).float()
    wide = [each.detach().float().requires_grad_() for each in (query, keys, values)]
    weights = transform(wide[0] @ wide[1].mT * 0.125, valid=allowed(70, 128, None, causal=False))
    some = weights > 1e-2
    kept = dropped / weights
    assert bool((((kept - 4 / 3).abs() < 2e-2) | (kept == 0))[some].all())
    assert float((kept[some] == 0).float().mean()) == pytest.approx(0.25, abs=0.08)
    found, wanted = run(values), weights * (dropped > 0) / 0.75 @ wide[2]
    upstream = torch.randn(found.shape, generator=drawing(8)).half()
    mine = (found, *torch.autograd.grad(found, (query, keys, values), upstream))
    theirs = (wanted, *torch.autograd.grad(wanted, wide, upstream.float()))
    for a, b in zip(mine, theirs, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 5e-3


@pytest.mark.parametrize(
    ("queries", "dtype", "times"), [(64, torch.float16, 1), (8, torch.float16, 0), (64, torch.float32, 0)]
)
def test_few_queries_and_float32_have_the_exact_kernel(queries, dtype, times, monkeypatch):
    called: list[bool] = []
    kernels = fused.kernels()
    assert kernels is not None

    class Noted:
        thresholds = Watched(kernels.rough.thresholds, called)
        contexts = kernels.rough.contexts

    monkeypatch.setattr(fused, "kernels", lambda: kernels._replace(rough=Noted))
    states = [each.detach().to(dtype) for each in given((1, 1, queries, 100, 16, 16))]
    fused.attend(*states, TRANSFORMS["entmax15"][0], scale=0.25)
    assert len(called) == times
