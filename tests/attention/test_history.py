"""Rows of hypotheses and queries of sources; what is left of fertilities."""

from __future__ import annotations

import torch

from attnbench.attention.history import endow, fold, last_position, remaining, unfold

INF = float("inf")


def test_fold_and_unfold_are_each_other_s_reverse():
    rows = torch.arange(2 * 3 * 2 * 5.0).view(6, 2, 5)
    queries = fold(rows, 2)
    assert queries.shape == (2, 2, 3, 5)
    assert torch.equal(queries[1, 0, 2], rows[5, 0])
    assert torch.equal(unfold(queries), rows)


def test_no_rows_fold_into_nothing():
    assert fold(torch.zeros(0, 2, 5), 0).shape == (0, 2, 0, 5)


def test_the_last_valid_position_is_the_sink_of_its_row():
    valid = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    assert last_position(valid).tolist() == [[False, False, True], [True, False, False], [False, False, False]]
    fertility = torch.tensor([[2.0, 3.0, 4.0]]).expand(3, 3)
    assert endow(fertility, valid).tolist() == [[2, 3, INF], [INF, 0, 0], [0, 0, 0]]


def test_left_is_what_was_not_spent_and_never_below_zero():
    fertility = torch.tensor([[1.0, 2.0, INF], [0.5, INF, 0.0]])
    spent = torch.tensor(
        [[[0.25, 2.5, 9.0]], [[1.0, 0.5, 0.0]], [[0.5, 1.0, 0.0]], [[0.0, 7.0, 0.0]]], requires_grad=True
    )
    found = remaining(fertility, spent)
    assert found.tolist() == [[[[0.75, 0, INF], [0, 1.5, INF]]], [[[0, INF, 0], [0.5, INF, 0]]]]
    found[0, 0, 0, 0].backward()
    assert spent.grad is not None
    assert spent.grad[0, 0].tolist() == [-1, 0, 0]
