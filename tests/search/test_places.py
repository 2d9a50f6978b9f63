"""A step of a beam in compiled code is the step that its definition makes, to the last digit and the last tie."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from attnbench.core import native
from attnbench.core.tree import map_batch, select_batch
from attnbench.search import places
from attnbench.search.places import Advanced, Ended, Limits, Live, Tokens, advance

PAD, EOS = 0, 2


@pytest.fixture(autouse=True)
def _compiled():
    if native.engine() is None:
        pytest.skip("no C++ compiler: torch operations serve")


def begun(rows: int, size: int, capacity: int) -> tuple[Live, Ended]:
    log_prob = torch.full((rows, size), -torch.inf, dtype=torch.float64)
    log_prob[:, 0] = 0.0
    live = Live(
        torch.arange(rows), log_prob, torch.full((rows, size, capacity), PAD), torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, size, capacity, dtype=torch.int16),
    )  # fmt: skip
    return live, Ended(rows, size, capacity, torch.float64, torch.device("cpu"))


def copied(tree: Any) -> Any:
    return map_batch(Tensor.clone, tree)


def table(ended: Ended) -> tuple[Tensor, ...]:
    return ended.score, ended.log_prob, ended.length, ended.tokens


def same(found: Advanced, wanted: Advanced) -> None:
    assert found.shared == wanted.shared
    assert all(map(torch.equal, found.live, wanted.live))
    assert torch.equal(found.parent, wanted.parent)
    assert torch.equal(found.done, wanted.done)


@given(
    seed=st.integers(0, 2**20), rows=st.integers(1, 12), size=st.integers(1, 6), words=st.integers(1, 9),
    capacity=st.integers(1, 7), n_best=st.integers(1, 6), round_to=st.sampled_from([1.0, 0.25, 1e-3]),
)  # fmt: skip
def test_whole_searches(seed, rows, size, words, capacity, n_best, round_to):
    """Rounded log-probabilities are often equal, and some tokens have none; sources leave as they are done."""
    draw = torch.Generator().manual_seed(seed)
    room = torch.randint(1, capacity + 1, (rows,), generator=draw)
    divisors = torch.arange(1, capacity + 1, dtype=torch.float32) ** 0.6
    limits = Limits(room, divisors.double()[room - 1], divisors, EOS, min(n_best, size))
    live, ended = begun(rows, size, capacity)
    other, other_ended = copied(live), begun(rows, size, capacity)[1]
    choices = min(size, words)
    for step in range(capacity):
        n = len(live.source)
        given_rows = n * size if step else n
        log_prob = (torch.randn(given_rows, choices, generator=draw) / round_to).round() * round_to
        log_prob = log_prob.masked_fill(torch.rand(log_prob.shape, generator=draw) < 0.1, -torch.inf)
        ids = torch.stack([torch.randperm(words, generator=draw)[:choices] for _ in range(given_rows)])
        found = Tokens(log_prob.sort(-1, descending=True).values.float(), ids)
        assert places._library(live, found) is not None
        compiled = advance(live, ended, found, step, limits)
        with native.off():
            defined = advance(other, other_ended, found, step, limits)
        same(compiled, defined)
        assert all(map(torch.equal, table(ended), table(other_ended)))
        going = (~defined.done).nonzero().squeeze(1)
        if not len(going):
            break
        live, other = select_batch(compiled.live, going), select_batch(defined.live, going)


def test_threads_change_nothing():
    rows, size, capacity = 40, 5, 5
    draw = torch.Generator().manual_seed(0)
    limits = Limits(torch.full((rows,), capacity), torch.ones(rows).double(), torch.ones(capacity), EOS, 3)
    steps = []
    for step in range(3):  # in the last two some hypotheses end
        shape = rows * size if step else rows, size
        steps.append(Tokens(torch.randn(shape, generator=draw), torch.randint(EOS, 6, shape, generator=draw)))
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            live, ended = begun(rows, size, capacity)
            for step, found in enumerate(steps):
                advanced = advance(live, ended, found, step, limits)
                live = advanced.live
            results.append((advanced, table(ended)))
    finally:
        torch.set_num_threads(before)
    (first, first_table), (second, second_table) = results
    same(first, second)
    assert all(map(torch.equal, first_table, second_table))
    assert first.live.taken.max() > 1


def test_a_penalty_goes_through_the_definition():
    live, ended = begun(2, 3, 4)
    limits = Limits(torch.tensor([1, 4]), torch.ones(2).double(), torch.ones(4), EOS, 1)
    found = Tokens(torch.tensor([[-1.0, -2.0, -3.0]] * 2), torch.tensor([[2, 3, 4], [3, 4, 5]]))
    seen = []

    def penalty(after: Live, parent: Tensor) -> Tensor:
        seen.append(parent)
        return torch.full(parent.shape, -10.0)

    advance(live, ended, found, 0, limits, penalty)
    assert len(seen) == 1
    assert ended.score[0].tolist() == [-11.0, -12.0, -13.0]
    assert ended.log_prob[0].tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_definition_serves(dtype):
    live, _ = begun(1, 2, 3)
    found = Tokens(torch.zeros(1, 2, dtype=dtype), torch.zeros(1, 2, dtype=torch.int64))
    assert (places._library(live, found) is None) == (dtype == torch.float64)
    assert places._library(live._replace(log_prob=live.log_prob.float()), found) is None
    other = Tokens(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64))
    assert places._library(live, other) is None  # neither of a source nor of a place


def test_whatever_the_default_type_and_device():
    live, ended = begun(1, 2, 3)
    limits = Limits(torch.tensor([3]), torch.ones(1).double(), torch.ones(3), EOS, 1)
    found = Tokens(torch.tensor([[-1.0, -2.0]]), torch.tensor([[3, 4]]))
    with torch.device("meta"):
        advanced = advance(live, ended, found, 0, limits)
    assert advanced.parent.tolist() == [[0, 0]]
    assert advanced.done.tolist() == [False]
