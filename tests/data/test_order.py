from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.data.order import Shuffle


@settings(max_examples=60, deadline=None)
@given(size=st.integers(0, 3000), key=st.integers(0, 2**63 - 1))
def test_every_place_is_taken_once(size: int, key: int) -> None:
    out = Shuffle(size, key)(np.arange(size))
    assert sorted(out.tolist()) == list(range(size))


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 10**12), key=st.integers(0, 2**63 - 1), data=st.data())
def test_a_part_can_be_asked_for_alone(size: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=30, unique=True)), np.int64)
    shuffle = Shuffle(size, key)
    out = shuffle(index)
    assert len(set(out.tolist())) == len(index)
    assert all(0 <= place < size for place in out.tolist())
    assert [int(shuffle(index[i : i + 1])[0]) for i in range(len(index))] == out.tolist()


def test_keys_give_different_orders_and_the_same_on_every_machine() -> None:
    index = np.arange(1000)
    first, second = Shuffle(1000, 1)(index), Shuffle(1000, 2)(index)
    assert (first == second).sum() < 20
    assert first[:8].tolist() == [148, 437, 42, 190, 164, 489, 360, 327]


def test_neighbours_do_not_stay_together() -> None:
    out = Shuffle(100_000, 7)(np.arange(100_000))
    assert abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), out)[0, 1]) < 0.02
    counts = np.bincount(out[:10_000] // 10_000, minlength=10)  # the first tenth comes from everywhere
    assert counts.min() > 850
    assert counts.max() < 1150


def test_indices_outside_are_refused() -> None:
    with pytest.raises(IndexError):
        Shuffle(5, 1)(np.array([5]))
    with pytest.raises(ValueError, match="negative"):
        Shuffle(-1, 1)
