"""Long rows, which go by lists of the keys that can have a weight, have what the definition gives them."""

from __future__ import annotations

import fused_laws as laws
import pytest
import torch
from fused_laws import both, close, drawing, given, products_of_equal_keys_are_equal

from attnbench.attention.backends import fused
from attnbench.attention.transforms.base import Fused

pytestmark = laws.NEEDED


@pytest.fixture
def listed(monkeypatch):
    """Every row goes by lists, however short; how often they were made."""
    made = []
    monkeypatch.setattr(fused, "LONG", dict.fromkeys(fused.LONG, 1))
    monkeypatch.setattr(fused, "FEWEST", 1)
    monkeypatch.setattr(fused, "_lists", lambda *given, make=fused._lists: made.append(make(*given)) or made[-1])
    return made


LISTED = ["topk", "sparsemax", "entmax15"]


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("masked", [False, True])
def test_lists_give_the_same(name, masked, listed):
    laws.values_and_gradients_over_several_blocks(name, masked)
    assert len(listed) == 1
    assert int(listed[0].found.max()) < 70


@pytest.mark.parametrize("name", LISTED)
def test_lists_of_strange_rows(name, listed):
    laws.rows_without_a_key_are_zero(name)
    laws.equal_scores_share_alike(name)
    laws.what_is_no_number_spoils_its_row_alone_and_masked_it_spoils_none(name, torch.nan)
    laws.what_is_no_number_spoils_its_row_alone_and_masked_it_spoils_none(name, torch.inf)
    assert len(listed) == 6


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1, 1), (3, 2, 1, 37, 16, 8), (1, 1, 33, 65, 64, 17), (1, 1, 3, 140, 8, 8)]
)
def test_lists_of_any_shape(shape, listed):
    laws.any_shape("topk", shape, causal=False)
    laws.any_shape("entmax15", shape, causal=True)
    assert len(listed) == 2


@pytest.mark.parametrize("k", [2, 7, 32])
def test_lists_keep_all_keys_that_tie(k, listed):
    laws.keys_that_tie_with_the_kth_are_all_kept(k)
    assert len(listed) == 1


@pytest.mark.parametrize("name", ["topk", "sparsemax"])
def test_dropout_on_lists(name, listed):
    laws.dropout_scales_what_it_keeps_and_backward_meets_the_same_draw(name, 40)
    assert listed


@pytest.mark.parametrize(("name", "causal"), [("topk", True), ("entmax15", False)])
def test_rows_with_more_keys_than_their_lists_have_room_for(name, causal, listed, monkeypatch):
    """Some rows of one block are listed, some are not, and one head is listed whole."""
    monkeypatch.setattr(fused, "_ROOM", dict.fromkeys(fused._ROOM, 16))
    states = given((2, 1, 70, 70, 8, 8))
    with torch.no_grad():
        states[0][0, 0, ::3] = 0  # scores that are all alike
        states[0][1] *= 20
    close(*both(name, states, causal=causal), 1e-4)
    crowded = listed[0].found > 16
    assert bool(crowded[0, 0].any())
    assert not bool(crowded[0, 0].all())
    assert bool(listed[0].crowded[0, 0])
    assert not bool(listed[0].crowded[1].any())


def test_more_ties_than_a_list_has_room_for_keep_their_weights_however_their_scores_are_rounded(listed):
    """Two kernels with tiles of their own round one score to two numbers."""
    if fused.interpreted() and not products_of_equal_keys_are_equal():
        pytest.skip("on this processor numpy's products of one query with equal keys differ in their last digit")
    query, keys = torch.randn(1, 1, 64, 128, generator=drawing(0)), torch.randn(1, 1, 1, 128, generator=drawing(1))
    keys, values = keys.expand(-1, -1, 512, -1), torch.randn(1, 1, 512, 4, generator=drawing(2))
    found = fused.attend(query, keys, values, Fused("topk", 8), scale=128**-0.5)
    assert listed
    close([found], [values.mean(2, keepdim=True).expand_as(found)])


def test_which_rows_are_listed():
    query, long, short = (torch.randn(1, 1, count, 4) for count in (64, fused.LONG["topk"], fused.LONG["topk"] - 1))
    assert fused._room(Fused("topk", 8), query, long)
    assert not fused._room(Fused("topk", 8), query, short)
    assert not fused._room(Fused("topk", 8), query[:, :, 1:], long)
    assert not fused._room(Fused("topk", 33), query, long)
    assert not fused._room(Fused("softmax"), query, long)
    torch.use_deterministic_algorithms(True)
    try:
        assert not fused._room(Fused("topk", 8), query, long)
    finally:
        torch.use_deterministic_algorithms(False)
