import pytest
import torch

from attnbench.models.base import Source
from attnbench.search.base import DEAD_END, searches

LENGTHS = (7, 3, 9, 1, 5, 0)


@pytest.fixture
def greedy():
    return searches.parse({"kind": "greedy", "max_ratio": 2.0, "max_extra": 3}).build()


def test_each_token_is_the_likeliest(lab, greedy):
    model, source = lab.toy(eos=0.5), lab.sources(*LENGTHS)
    for row, ((found,), length) in enumerate(zip(greedy(model, source, lab.special), LENGTHS, strict=True)):
        ((tokens, log_prob, _, finished),) = lab.plain_beam(
            model, lab.alone(source, row, length), 2 * length + 3, 1, lambda n: 1.0
        )
        assert (found.tokens, found.finished) == (tokens, finished)
        assert found.log_prob == found.score == pytest.approx(log_prob, abs=1e-10)


def test_scores_are_those_of_decode(lab, greedy):
    model, source = lab.toy(seed=4, eos=0.5), lab.sources(*LENGTHS)
    for row, ((found,), length) in enumerate(zip(greedy(model, source, lab.special), LENGTHS, strict=True)):
        assert found.log_prob == pytest.approx(lab.rescore(model, lab.alone(source, row, length), found), abs=1e-10)


def test_the_batch_shrinks_and_stops(lab, greedy):
    model, source = lab.toy(eos=1.0), lab.sources(*LENGTHS)
    found = greedy(model, source, lab.special)
    lengths = [len(row[0].tokens) + row[0].finished for row in found]
    assert [rows for rows, _ in model.seen] == [
        sum(length > step for length in lengths) for step in range(max(lengths))
    ]
    assert all(rows == tokens for rows, tokens in model.seen)


def test_nothing_to_choose_ends_a_row_and_no_other(lab, greedy):
    model, source = lab.toy(eos=0.5), lab.sources(5, 5, 5)
    clean = greedy(model, source, lab.special)
    start = (model.encode(source).key[1] * 31 + 1 + 1) % len(model.table)
    for poison in (torch.nan, -torch.inf):
        model.table[start] = poison
        found = greedy(model, source, lab.special)
        assert found[1] == [DEAD_END]
        assert [found[0], found[2]] == [clean[0], clean[2]]


def test_no_sources(lab, greedy):
    empty = Source(torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4, dtype=torch.bool))
    assert greedy(lab.toy(), empty, lab.special) == []
