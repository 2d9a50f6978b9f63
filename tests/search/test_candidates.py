import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.core import native
from attnbench.search.candidates import top_tokens


def oracle(row, count, banned):
    """Plain sort of one row: [(token, log-probability)], equal ones in the order of their ids."""
    logits = torch.tensor(row, dtype=torch.float64)
    log_probs = logits.log_softmax(-1).tolist()
    for token in banned:
        log_probs[token] = -math.inf
    return sorted(enumerate(log_probs), key=lambda item: (-item[1], item[0]))[:count]


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_equals_a_plain_sort_with_ties_and_impossible_tokens(data):
    vocabulary = data.draw(st.one_of(st.integers(3, 40), st.sampled_from([640, 1300, 1344])))  # long rows go by blocks
    levels = torch.tensor(data.draw(st.sampled_from([(0.0, 1.0, 2.0, -math.inf), (0.0, 1.0), (0.0, *[-math.inf] * 9)])))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    rows = levels[torch.randint(len(levels), (data.draw(st.integers(1, 4)), vocabulary), generator=generator)]
    rows[:, 2] = 0.0  # something is possible
    rows = rows.tolist()
    count = data.draw(st.integers(1, 9))
    banned = data.draw(st.sampled_from([(), (0,), (0, 1)]))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))  # the last two are compiled
    log_probs, ids = top_tokens(torch.tensor(rows, dtype=dtype), count, banned)
    assert log_probs.shape == ids.shape == (len(rows), min(count, vocabulary))
    for values, tokens, row in zip(log_probs.tolist(), ids.tolist(), rows, strict=True):
        expected = oracle(row, count, banned)
        assert values == pytest.approx([value for _, value in expected], rel=1e-5)
        possible = [token for token, value in expected if value > -math.inf]
        assert tokens[: len(possible)] == possible


def test_a_row_gets_the_same_whatever_stands_beside_it():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0)).mul(4).round().div(4)
    together = top_tokens(logits, 5, (0, 1))
    for row in range(0, 64, 7):
        single = top_tokens(logits[row : row + 1], 5, (0, 1))
        assert torch.equal(single[0][0], together[0][row])
        assert torch.equal(single[1][0], together[1][row])


def test_fewer_tokens_wanted_are_the_first_of_more():
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1)).mul(2).round()
    for count in (1, 4):
        few, many = top_tokens(logits, count, (0, 1)), top_tokens(logits, 8, (0, 1))
        assert torch.equal(few[0], many[0][:, :count])
        assert torch.equal(few[1], many[1][:, :count])


def test_low_precision_is_widened_before_the_softmax():
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(2)).bfloat16()
    log_probs, ids = top_tokens(logits, 3)
    assert log_probs.dtype == torch.float32
    expected = logits.double().log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=2e-6)


def test_banned_tokens_keep_their_mass_and_come_last():
    log_probs, ids = top_tokens(torch.tensor([[3.0, 3.0, 1.0, 0.0]]), 4, (0, 1))
    assert ids[0, :2].tolist() == [2, 3]
    expected = torch.tensor([3.0, 3.0, 1.0, 0.0]).log_softmax(-1)
    torch.testing.assert_close(log_probs[0, :2], expected[2:])
    assert (log_probs[0, 2:] == -torch.inf).all()


def test_rows_that_are_not_numbers_are_impossible_and_alone():
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(3))
    clean = top_tokens(logits, 4)
    logits[1, 7] = torch.nan
    log_probs, ids = top_tokens(logits, 4)
    assert (log_probs[1] == -torch.inf).all()
    for row in (0, 2):
        assert torch.equal(log_probs[row], clean[0][row])
        assert torch.equal(ids[row], clean[1][row])
    assert (top_tokens(torch.full((2, 30), -torch.inf), 4)[0] == -torch.inf).all()


def test_the_input_is_left_as_it_was():
    logits = torch.zeros(2, 9)
    top_tokens(logits, 3, (0, 1))
    assert torch.equal(logits, torch.zeros(2, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "count"), [(1, 1), (5, 5), (63, 2), (64, 3), (65, 7), (700, 11), (10_000, 5)])
@pytest.mark.parametrize("banned", [(), (0, 1), (3, 99_999)])
def test_the_compiled_path_gives_what_torch_gives(dtype, vocabulary, count, banned):
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(3)).mul(6).to(dtype)
    logits[4] = 0.0
    logits[5, vocabulary // 2 :] = -torch.inf
    if vocabulary == 1:
        logits[5] = 1.0
    log_probs, ids = top_tokens(logits, count, banned)
    with native.off():
        wanted, wanted_ids = top_tokens(logits, count, banned)
    torch.testing.assert_close(log_probs, wanted, rtol=1e-6, atol=2e-6)
    assert torch.equal(ids.where(wanted > -torch.inf, 0), wanted_ids.where(wanted > -torch.inf, 0))


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_rows_that_are_no_numbers_are_impossible_and_spoil_no_other(strange):
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(4))
    alone = top_tokens(logits[::2], 4, (0,))
    logits[1] = strange
    log_probs, ids = top_tokens(logits, 4, (0,))
    assert bool((log_probs[1] == -torch.inf).all())
    torch.testing.assert_close(log_probs[::2], alone[0])
    assert torch.equal(ids[::2], alone[1])


def test_logits_that_do_not_lie_in_one_piece():
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(5))
    found, wanted = top_tokens(logits.T, 4), top_tokens(logits.T.contiguous(), 4)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_another_default_device_changes_nothing():
    logits = torch.randn(4, 800)
    wanted = top_tokens(logits, 5)
    with torch.device("meta"):
        found = top_tokens(logits, 5)
    assert all(map(torch.equal, found, wanted))
