"""REP and DROP by hand, and against counts taken one bigram at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.metrics.rep_drop import droppings, repetitions, share

LINES = st.lists(st.sampled_from("abc"), max_size=9).map(" ".join)


@pytest.mark.parametrize(("line", "reference", "more"), [
    ("a b a b", "a b", 1),  # `a b` twice, once in the reference; `b a` once only
    ("a b a b", "a b c a b", 0),
    ("a b", "c d e", 0),  # once is no repetition
    ("a a", "a", 2),  # a doubled word counts from the first time
    ("a a a", "a", 2 + 4),  # the bigram `a a` twice, and doubled twice
    ("a a a", "a a", 1 + 2),
    ("", "a b", 0),
    ("A a A a", "a", 2),  # `A a` twice; case counts
])  # fmt: skip
def test_repetitions_by_hand(line, reference, more):
    assert repetitions([line], [reference]).tolist() == [[more, len(reference.split())]]


@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=4))
def test_repetitions_are_the_formula(pairs):
    for (line, reference), found in zip(pairs, repetitions(*zip(*pairs, strict=True)).tolist(), strict=True):
        words, wanted = line.split(), reference.split()
        total = 0
        for first in "abc":
            for second in "abc":
                count, allowed = (
                    sum(side[i] == first and side[i + 1] == second for i in range(len(side) - 1))
                    for side in (words, wanted)
                )
                total += max(0, count - allowed) * ((count >= 2) + 2 * (first == second))
        assert found == [total, len(wanted)]


def test_droppings_count_positions_once():
    reference = [[(0, 0), (0, 1), (1, 2), (3, 3)], [], [(2, 0)]]
    hypothesis = [[(1, 0), (1, 5), (2, 2)], [(0, 0)], [(2, 1)]]
    assert droppings(hypothesis, reference).tolist() == [[2, 3], [0, 0], [0, 1]]


def test_a_score_is_the_share_of_sums_not_a_mean_of_shares():
    assert share(np.array([[1, 2], [0, 8]])) == pytest.approx(10.0)
    assert share(np.array([[0, 0]])) is None
    assert share(repetitions([], [])) is None


def test_sides_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="argument"):
        repetitions(["a"], [])
    with pytest.raises(ValueError, match="argument"):
        droppings([[]], [])
