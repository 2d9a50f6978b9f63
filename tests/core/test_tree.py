from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnbench.core.tree import Shared, closed_up, expand_batch, map_batch, select_batch


class Leaf(NamedTuple):
    rows: Tensor
    shared: Tensor
    number: int
    nothing: Tensor | None


class Node(NamedTuple):
    leaf: Leaf
    many: list[Tensor]
    pair: tuple[Tensor, float]
    name: str


@pytest.fixture
def tree() -> Node:
    rows = torch.arange(6).view(3, 2)
    return Node(Leaf(rows, torch.tensor(7.0), 4, None), [rows * 10, rows[:, 0]], (rows[:, 1], 0.5), "x")


def test_rows_are_picked_everywhere_and_the_rest_is_shared(tree: Node):
    index = torch.tensor([2, 0, 0, 1])
    picked = select_batch(tree, index)
    assert type(picked) is Node
    assert type(picked.leaf) is Leaf
    assert torch.equal(picked.leaf.rows, tree.leaf.rows[index])
    assert torch.equal(picked.many[0], tree.many[0][index])
    assert torch.equal(picked.many[1], tree.many[1][index])
    assert torch.equal(picked.pair[0], tree.pair[0][index])
    assert picked.leaf.shared is tree.leaf.shared
    assert (picked.leaf.number, picked.leaf.nothing, picked.pair[1], picked.name) == (4, None, 0.5, "x")


@given(st.lists(st.booleans(), max_size=12))
def test_gaps_are_closed_from_the_end(stay):
    order = closed_up(torch.tensor(stay, dtype=torch.bool)).tolist()
    assert sorted(order) == [row for row, stays in enumerate(stay) if stays]
    assert all(row == place or (not stay[place] and row >= len(order)) for place, row in enumerate(order))


def test_copies_of_a_row_are_adjacent(tree: Node):
    wide = expand_batch(tree, 2)
    assert wide.many[1].tolist() == [0, 0, 2, 2, 4, 4]
    assert torch.equal(wide.leaf.rows, select_batch(tree, torch.tensor([0, 0, 1, 1, 2, 2])).leaf.rows)
    assert expand_batch(tree, 1).many[1].tolist() == tree.many[1].tolist()


def test_no_rows_left(tree: Node):
    assert select_batch(tree, torch.tensor([], dtype=torch.long)).leaf.rows.shape == (0, 2)


def test_what_is_no_tree_is_refused():
    class Holder:
        pass

    values: list[Any] = [{"a": torch.ones(1)}, Holder(), {1}]
    for value in values:
        with pytest.raises(TypeError, match="a tree holds"):
            map_batch(lambda tensor: tensor, (value,))


def test_what_is_shared_stays_itself():
    class Whole(Shared):
        pass

    whole = Whole()
    picked = select_batch((torch.arange(3), whole), torch.tensor([2, 2]))
    assert picked[0].tolist() == [2, 2]
    assert picked[1] is whole
