from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.metrics.alignment import (
    alignment_error_rate,
    attention_links,
    soft_alignment_error_rate,
    word_weights,
)

WIDE = 5
link = st.tuples(st.integers(0, WIDE - 1), st.integers(0, WIDE - 1))
links = st.sets(link, max_size=8)
corpora = st.lists(st.tuples(links, links, links), max_size=4)


def test_by_hand():
    """Three links: one sure, one possible, one wrong; the other sure link is missed."""
    score = alignment_error_rate([[(0, 0), (1, 1), (2, 2)]], [[(0, 0), (3, 3)]], [[(1, 1)]])
    assert score == pytest.approx((1 - (1 + 2) / (3 + 2), 2 / 3, 1 / 2))


def test_a_perfect_alignment_may_leave_out_what_is_only_possible():
    assert alignment_error_rate([[(0, 0)]], [[(0, 0)]], [[(0, 0), (0, 1)]]) == (0.0, 1.0, 1.0)
    assert alignment_error_rate([[(0, 0), (0, 1)]], [[(0, 0)]], [[(0, 0), (0, 1)]]) == (0.0, 1.0, 1.0)


@settings(max_examples=80, deadline=None)
@given(corpora)
def test_sums_over_pairs_as_defined(corpus):
    ours, sure, maybe = ([list(pair[kind]) for pair in corpus] for kind in (0, 1, 2))
    a = sum(len(pair[0]) for pair in corpus)
    s = sum(len(pair[1]) for pair in corpus)
    a_and_s = sum(x in pair[1] for pair in corpus for x in pair[0])
    a_and_p = sum(x in pair[1] or x in pair[2] for pair in corpus for x in pair[0])
    score = alignment_error_rate(ours, sure, maybe)
    assert score.aer == (pytest.approx(1 - (a_and_s + a_and_p) / (a + s)) if a + s else None)
    assert score.precision == (pytest.approx(a_and_p / a) if a else None)
    assert score.recall == (pytest.approx(a_and_s / s) if s else None)
    hard = [np.zeros((WIDE, WIDE)) for _ in corpus]
    for table, pair in zip(hard, ours, strict=True):
        for source, target in pair:
            table[target, source] = 1.0
    assert soft_alignment_error_rate(hard, sure, maybe) == pytest.approx(score)
    assert alignment_error_rate([each * 2 for each in ours], sure, maybe) == pytest.approx(score)


def test_soft_by_hand():
    weights = np.array([[0.7, 0.3], [0.4, 0.6]])  # two target words over two source words
    score = soft_alignment_error_rate([weights], [[(0, 0)]], [[(0, 1)]])
    assert score == pytest.approx((1 - (0.7 + 1.1) / (2 + 1), 1.1 / 2, 0.7))


def test_nothing_to_divide_by():
    assert alignment_error_rate([], [], []) == (None, None, None)
    assert alignment_error_rate([[]], [[(0, 0)]], [[]]) == (1.0, None, 0.0)
    assert alignment_error_rate([[(0, 0)]], [[]], [[]]) == (1.0, 0.0, None)
    assert soft_alignment_error_rate([np.zeros((0, 3))], [[]], [[]]) == (None, None, None)


def test_the_largest_weight_of_each_target_word():
    assert attention_links([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3], [0.0, 0.5, 0.5]]) == [(0, 1), (1, 0), (1, 2)]
    assert attention_links([[0.0, 0.0], [0.0, 1.0]]) == [(1, 1)]  # no weight, no link
    for empty in (np.zeros((0, 3)), np.zeros((2, 0))):
        assert attention_links(empty) == []


def test_pieces_become_words():
    weights = np.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.1, 0.3], [0.0, 0.0, 1.0, 0.0]])
    words = word_weights(weights, [3, 1], [2, 1])
    np.testing.assert_allclose(words, [[(0.6 + 0.7) / 2, (0.4 + 0.3) / 2], [1.0, 0.0]])


SIZES = st.lists(st.integers(0, 3), max_size=6)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, st.integers(0, 999))
def test_pieces_become_words_as_defined(source, target, seed):
    weights = np.random.default_rng(seed).random((sum(target), sum(source)))
    found = word_weights(weights, source, target)
    assert found.shape == (len(target), len(source))
    for row, rows in enumerate(target):
        for column, columns in enumerate(source):
            top, left = sum(target[:row]), sum(source[:column])
            block = weights[top : top + rows, left : left + columns]
            assert found[row, column] == pytest.approx(block.sum() / rows if rows else 0.0)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="1 alignments cannot be scored against 2 sure and 1 possible"):
        alignment_error_rate([[]], [[], []], [[]])
    with pytest.raises(ValueError, match=r"weights \(1, 2\) do not belong to 1 target and 3 source pieces"):
        word_weights([[0.5, 0.5]], [1, 2], [1])
    for beyond in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match=r"pair 1: a link lies beyond its weights \(2, 2\)"):
            soft_alignment_error_rate([np.eye(2), np.eye(2)], [[], [beyond]], [[], []])
