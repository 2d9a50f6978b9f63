import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.models.base import Seq2SeqModel, Source
from attnbench.search.base import DEAD_END, searches
from attnbench.search.places import Live

PENALTIES = {
    "none": lambda n: 1.0,
    "avg": lambda n: float(n),
    "wu": lambda n: ((5 + n) / 6) ** 0.6,
}
EXTREME = {"avg": {"kind": "avg", "alpha": 3.0}, "wu": {"kind": "wu", "alpha": 4.0}}
LENGTHS = (4, 1, 6, 0, 3, 6)


def beam(size, penalty="none", n_best=1, ratio=1.0, extra=3):
    return searches.parse(
        {"kind": "beam", "size": size, "penalty": penalty, "n_best": n_best, "max_ratio": ratio, "max_extra": extra}
    ).build()


def agree(found, expected):
    """The same tokens in the same order, and scores but for rounding."""
    assert [(h.tokens, h.finished) for h in found] == [(tokens, finished) for tokens, _, _, finished in expected]
    for hypothesis, (_, log_prob, score, _) in zip(found, expected, strict=True):
        assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-10)
        assert hypothesis.score == pytest.approx(score, abs=1e-10)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_for_every_prefix_finds_what_brute_force_finds(lab, penalty, seed):
    model, source = lab.toy(seed, vocabulary=5), lab.sources(2, 1, seed=seed)
    found = beam(64, penalty, n_best=64)(model, source, lab.special)
    best = beam(64, penalty)(model, source, lab.special)
    for row, (length, room) in enumerate([(2, 5), (1, 4)]):
        every = lab.everything(model, lab.alone(source, row, length), room, PENALTIES[penalty], vocabulary=5)
        agree(found[row], every[:64])
        agree(best[row], every[:1])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(4, 9),
    size=st.integers(1, 6),
    penalty=st.sampled_from(list(PENALTIES)),
    eos=st.sampled_from([-1.0, 0.5, 2.0]),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_it_is_the_plain_beam_and_stopping_early_changes_nothing(
    lab, seed, vocabulary, size, penalty, eos, lengths, data
):
    n_best = data.draw(st.integers(1, size))
    model, source = lab.toy(seed, vocabulary, eos), lab.sources(*lengths, seed=seed, pad_to=1)
    found = beam(size, penalty, n_best)(model, source, lab.special)
    for row, length in enumerate(lengths):
        expected = lab.plain_beam(model, lab.alone(source, row, length), length + 3, size, PENALTIES[penalty])
        agree(found[row], expected[:n_best])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 5),
    penalty=st.sampled_from([*PENALTIES, *EXTREME.values()]),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    round_to=st.sampled_from([None, 1.0]),
)
def test_batch_and_padding_change_nothing_ties_included(lab, seed, size, penalty, lengths, round_to):
    model = lab.toy(seed, 7, eos=0.5, round_to=round_to)
    search = beam(size, penalty, n_best=size)
    source = lab.sources(*lengths, seed=seed, pad_to=8)
    together = search(model, source, lab.special)
    assert together == [
        search(model, lab.alone(source, row, length), lab.special)[0] for row, length in enumerate(lengths)
    ]
    backwards = Source(source.data.flip(0), source.valid.flip(0))
    assert search(model, backwards, lab.special) == together[::-1]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    penalty=st.sampled_from([*PENALTIES, *EXTREME.values()]),
    round_to=st.sampled_from([None, 1.0]),
    eos=st.sampled_from([-1.0, 1.0]),
)
def test_size_one_is_greedy_under_every_penalty(lab, seed, penalty, round_to, eos):
    model, source = lab.toy(seed, 7, eos, round_to), lab.sources(*LENGTHS, seed=seed)
    greedy = searches.parse({"kind": "greedy", "max_ratio": 1.0, "max_extra": 3}).build()(model, source, lab.special)
    found = beam(1, penalty)(model, source, lab.special)
    for (one,), (other,) in zip(found, greedy, strict=True):
        assert (one.tokens, one.log_prob, one.finished) == (other.tokens, other.log_prob, other.finished)
        if penalty == "none":
            assert one == other


@pytest.mark.parametrize("penalty", PENALTIES)
def test_n_best_is_sorted_distinct_and_scored_as_by_decode(lab, penalty):
    model, source = lab.toy(5, 8, eos=0.5), lab.sources(*LENGTHS)
    for row, found in enumerate(beam(6, penalty, n_best=6)(model, source, lab.special)):
        assert len(found) == 6
        assert len({(tuple(h.tokens), h.finished) for h in found}) == 6
        assert found == sorted(found, key=lambda h: (not h.finished, -h.score))
        for hypothesis in found:
            single = lab.alone(source, row, LENGTHS[row])
            assert hypothesis.log_prob == pytest.approx(lab.rescore(model, single, hypothesis), abs=1e-10)
            length = len(hypothesis.tokens) + hypothesis.finished
            assert hypothesis.score == pytest.approx(hypothesis.log_prob / PENALTIES[penalty](length), abs=1e-12)
            assert length <= LENGTHS[row] + 3
            assert not {0, 1, 2} & set(hypothesis.tokens)


def test_fewer_best_are_the_first_of_more(lab):
    model, source = lab.toy(6, 8, eos=0.5), lab.sources(*LENGTHS)
    everything = beam(5, "avg", n_best=5)(model, source, lab.special)
    for n_best in (1, 2, 4):
        assert beam(5, "avg", n_best)(model, source, lab.special) == [row[:n_best] for row in everything]


def test_sources_leave_as_they_end_and_memory_keeps_one_row_each(lab):
    model, source = lab.toy(2, 8, eos=1.0), lab.sources(1, 2, 4, 8, 12, 15)
    beam(3, "none", ratio=1.0, extra=2)(model, source, lab.special)
    sources = [rows for rows, _ in model.seen]
    assert sources[0] == 6
    assert sources[-1] < 6
    assert sources == sorted(sources, reverse=True)
    (first, once), *later = model.seen
    assert once == first  # the places of a source are the same until something stands in them
    assert all(rows == 3 * n for n, rows in later)


def test_it_stops_as_soon_as_nothing_better_can_come(lab):
    table = torch.full((997, 6), -9.0, dtype=torch.float64)
    table[:, 2] = 0.0
    model = lab.Toy(table)
    beam(4, "none", ratio=0.0, extra=50)(model, lab.sources(5), lab.special)
    assert len(model.seen) == 1  # the empty output has nearly all the mass
    model.seen.clear()
    beam(4, "none", n_best=4, ratio=0.0, extra=50)(model, lab.sources(5), lab.special)
    assert len(model.seen) == 2  # EOS at once, then after each of the three other tokens


def test_it_goes_on_as_long_as_the_penalty_lets_something_better_come(lab):
    table = torch.tensor([-torch.inf, -torch.inf, 0.75, 0.25], dtype=torch.float64)
    table[2:].log_()
    model = lab.Toy(table.expand(997, 4).clone())
    # the empty output scores log 0.75 = -0.29; n tokens without EOS, at n log 0.25 = -1.39 n, may come to -0.139 n
    beam(20, "avg", ratio=0.0, extra=10)(model, lab.sources(5), lab.special)
    assert len(model.seen) == 3


@pytest.mark.parametrize("size", [1, 3, 6, 30])
def test_equal_candidates_come_by_the_place_of_their_parent_then_by_id(lab, size):
    model = lab.Toy(torch.zeros(997, 40, dtype=torch.float64))
    (found,) = beam(size, "avg", n_best=size)(model, lab.sources(2), lab.special)
    expected = lab.plain_beam(model, lab.sources(2), 5, size, PENALTIES["avg"])
    assert [(h.tokens, h.finished) for h in found] == [(tokens, finished) for tokens, _, _, finished in expected]


def test_the_state_stays_where_no_beam_moved(lab, monkeypatch):
    moved = []

    def spy(self, state, rows, shared):
        moved.append(rows)
        return Seq2SeqModel.reorder(self, state, rows, shared)

    monkeypatch.setattr(lab.Toy, "reorder", spy)
    beam(1, "none", ratio=0.0, extra=6)(lab.toy(3, eos=-50.0), lab.sources(5, 4), lab.special)
    assert not moved
    beam(3, "none", ratio=0.0, extra=6)(lab.toy(3, eos=-50.0), lab.sources(5, 4), lab.special)
    assert moved


def test_cut_hypotheses_come_after_every_finished_one(lab):
    model = lab.toy(1, 6, eos=-3.0)
    (found,) = beam(8, "none", n_best=8, ratio=0.0, extra=3)(model, lab.sources(4), lab.special)
    finished = [h.finished for h in found]
    assert True in finished
    assert False in finished
    assert finished == sorted(finished, reverse=True)
    assert max(h.score for h in found if not h.finished) > min(h.score for h in found if h.finished)
    assert all(len(h.tokens) == 3 for h in found if not h.finished)


def test_pad_and_bos_are_never_chosen_though_they_be_likeliest(lab):
    model = lab.toy(1, 8)
    model.table[:, :2] += 8.0
    source = lab.sources(3, 4)
    for row, found in enumerate(beam(4, n_best=4)(model, source, lab.special)):
        for hypothesis in found:
            assert not {0, 1} & set(hypothesis.tokens)
            single = lab.alone(source, row, (3, 4)[row])
            assert hypothesis.log_prob == pytest.approx(lab.rescore(model, single, hypothesis), abs=1e-10)


def test_a_vocabulary_smaller_than_the_beam(lab):
    model, source = lab.toy(0, vocabulary=4), lab.sources(2, 0, pad_to=1)
    found = beam(9, "avg", n_best=9)(model, source, lab.special)
    assert [len(row) for row in found] == [6, 4]  # EOS after 0 to 4 (2) tokens, or the limit
    only_eos = beam(5, "none", n_best=5)(lab.toy(0, vocabulary=3), source, lab.special)
    assert [[(h.tokens, h.finished) for h in row] for row in only_eos] == [[([], True)]] * 2


def test_nothing_to_choose_ends_a_source_and_no_other(lab):
    model, source = lab.toy(3, eos=0.5), lab.sources(5, 5, 5)
    clean = beam(3)(model, source, lab.special)
    start = (model.encode(source).key[1] * 31 + 1 + 1) % len(model.table)
    for poison in (torch.nan, -torch.inf):
        model.table[start] = poison
        found = beam(3)(model, source, lab.special)
        assert found[1] == [DEAD_END]
        assert [found[0], found[2]] == [clean[0], clean[2]]
        model.seen.clear()
        assert beam(3)(model, Source(source.data[1:2], source.valid[1:2]), lab.special) == [[DEAD_END]]
        assert len(model.seen) == 1


def test_no_sources(lab):
    empty = Source(torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4, dtype=torch.bool))
    assert beam(3)(lab.toy(), empty, lab.special) == []


def test_no_gradient_is_kept(lab):
    model = lab.toy()
    model.table.requires_grad_(True)
    ((found,),) = beam(2)(model, lab.sources(3), lab.special)
    assert isinstance(found.log_prob, float)
    assert torch.is_grad_enabled()


def live(lineage, log_prob, taken):
    lineage = torch.tensor([lineage], dtype=torch.int16)
    tokens = torch.zeros(lineage.shape, dtype=torch.long)
    return Live(torch.tensor([0]), torch.tensor([log_prob]), tokens, torch.tensor([taken]), lineage)


def test_what_places_have_in_common():
    """BOS, and the tokens up to where they part; a place that is lost but whose hypothesis lives on counts still."""
    lineage, lost = [[0, 0], [0, 1], [0, 2], [1, 3]], -torch.inf
    assert live(lineage, [-1.0, -2.0, -3.0, -4.0], 0).shared(0) == 1
    assert live(lineage, [-1.0, -2.0, -3.0, -4.0], 0).shared(2) == 1
    assert live(lineage, [-1.0, lost, -2.0, -3.0], 1).shared(2) == 1
    assert live(lineage, [-1.0, -2.0, -3.0, lost], 1).shared(2) == 2
    assert live(lineage, [-1.0, -2.0, -3.0, lost], 0).shared(2) == 1  # something may come to stand there
    assert live(lineage, [-1.0, lost, lost, lost], 3).shared(2) == 3
