from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnbench.data.base import BOS, EOS, PAD, Batch, Cursor
from attnbench.data.batching import Ids, TrainStream, cut, eval_batches, rounded
from attnbench.data.store import IdLists, IdsWriter

Rows = list[tuple[list[int], list[int]]]


def split(folder: Path, rows: Rows) -> Ids:
    for place, name in enumerate(("src", "tgt")):
        with IdsWriter(folder / f"{name}.ids", 1000) as writer:
            writer.write([row[place] for row in rows])
    widths = [max(len(source), len(target)) + 1 for source, target in rows]
    return Ids(IdLists(folder / "src.ids", 1000), IdLists(folder / "tgt.ids", 1000), sum(widths), max(widths))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ids, Rows]:
    rng = np.random.default_rng(1)
    rows = [
        (rng.integers(4, 1000, rng.integers(1, 15)).tolist(), rng.integers(4, 1000, rng.integers(1, 18)).tolist())
        for _ in range(1500)
    ]
    return split(tmp_path_factory.mktemp("ids"), rows), rows


def epoch(stream: TrainStream, number: int) -> list[Batch]:
    found = []
    for after, batch in stream.batches(Cursor(number)):
        found.append(batch)
        if after.epoch > number:
            return found
    raise AssertionError("the stream ended")


def key(batch: Batch) -> list[int]:
    return batch.index.tolist()


def check(batch: Batch, rows: Rows) -> None:
    """A batch against its rows, one by one."""
    for row, line in enumerate(batch.index.tolist()):
        source, target = rows[line]
        assert batch.source[row][batch.source_valid[row]].tolist() == [*source, EOS]
        assert batch.target_in[row][batch.target_valid[row]].tolist() == [BOS, *target]
        assert batch.target_out[row][batch.target_valid[row]].tolist() == [*target, EOS]
    for ids, valid in (
        (batch.source, batch.source_valid),
        (batch.target_in, batch.target_valid),
        (batch.target_out, batch.target_valid),
    ):
        assert ids.dtype == torch.int64
        assert (ids[~valid] == PAD).all()
        lengths = valid.sum(1)
        assert valid.equal(torch.arange(ids.shape[1]) < lengths[:, None])  # padded on the right
        assert lengths.max() == ids.shape[1]  # and no wider than needed


def area(batch: Batch) -> int:
    return len(batch.index) * max(batch.source.shape[1], batch.target_in.shape[1])


@pytest.mark.parametrize("tokens", [64, 100])
def test_an_epoch_has_every_pair_once_in_bounded_batches(corpus: tuple[Ids, Rows], tokens: int) -> None:
    ids, rows = corpus
    batches = epoch(TrainStream(ids, 3, tokens=tokens), 0)
    assert sorted(line for batch in batches for line in key(batch)) == list(range(len(rows)))
    assert all(area(batch) <= tokens for batch in batches)
    for batch in batches:
        check(batch, rows)


def test_batches_are_well_filled(corpus: tuple[Ids, Rows]) -> None:
    ids, _ = corpus
    batches = epoch(TrainStream(ids, 3, tokens=200), 0)
    assert sum(area(batch) for batch in batches) / (len(batches) * 200) > 0.85
    real = sum(max(batch.source_valid.sum(), batch.target_valid.sum()).item() for batch in batches)
    assert real / sum(area(batch) for batch in batches) > 0.8


def test_pools_are_several_and_cut_an_epoch(corpus: tuple[Ids, Rows]) -> None:
    ids, _ = corpus
    stream = TrainStream(ids, 3, tokens=64)
    assert stream.pools == 3
    cursors = [after for after, _ in islice(stream.batches(), 400)]
    assert {cursor.pool for cursor in cursors} == {0, 1, 2}
    assert all(a < b for a, b in pairwise(cursors))


def test_the_stream_is_a_function_of_seed_and_epoch(corpus: tuple[Ids, Rows]) -> None:
    ids, _ = corpus
    again = [key(batch) for batch in epoch(TrainStream(ids, 3, tokens=100), 0)]
    assert again == [key(batch) for batch in epoch(TrainStream(ids, 3, tokens=100), 0)]
    others = [epoch(TrainStream(ids, 3, tokens=100), 1), epoch(TrainStream(ids, 4, tokens=100), 0)]
    for other in others:
        assert [key(batch) for batch in other] != again
        assert {frozenset(key(batch)) for batch in other}.isdisjoint(map(frozenset, again))


def test_lengths_are_not_met_in_order(corpus: tuple[Ids, Rows]) -> None:
    widths = [batch.source.shape[1] for batch in epoch(TrainStream(corpus[0], 3, tokens=100), 0)]
    rises = sum(a < b for a, b in pairwise(widths))
    falls = sum(a > b for a, b in pairwise(widths))
    assert min(rises, falls) > len(widths) // 4


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_are_disjoint_and_together_the_whole(corpus: tuple[Ids, Rows], shards: int) -> None:
    ids, _ = corpus
    whole = [key(batch) for batch in epoch(TrainStream(ids, 3, tokens=100), 1)]
    counts = []
    found: list[list[int]] = []
    for shard in range(shards):
        stream = TrainStream(ids, 3, tokens=100, shard=(shard, shards))
        mine = [key(batch) for batch in epoch(stream, 1)]
        counts.append(len(mine))
        found += mine
    assert sorted(found) == sorted(whole)
    assert max(counts) - min(counts) <= 2  # one a pool, turned about


def test_pools_of_an_odd_number_of_batches_are_shared_evenly_within_an_epoch(tmp_path: Path) -> None:
    ids = split(tmp_path, [([5] * 3, [6])] * 505)  # each pair a batch, 101 a pool
    streams = [TrainStream(ids, 3, tokens=4, shard=(shard, 2)) for shard in range(2)]
    assert streams[0].pools == 5
    assert sorted(len(epoch(stream, 0)) for stream in streams) == [252, 253]


def test_few_batches_are_shared_evenly_over_epochs(corpus: tuple[Ids, Rows]) -> None:
    """One batch an epoch: each shard has every other one."""
    ids, _ = corpus
    streams = [TrainStream(ids, 3, tokens=10**6, shard=(shard, 2)).batches() for shard in range(2)]
    epochs = [[cursor.epoch for cursor, _ in islice(stream, 3)] for stream in streams]
    assert sorted(epochs) == [[1, 3, 5], [2, 4, 6]]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.integers(0, 700), shard=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]))
def test_going_on_from_any_cursor_equals_never_stopping(
    corpus: tuple[Ids, Rows], steps: int, shard: tuple[int, int]
) -> None:
    ids, _ = corpus
    stream = TrainStream(ids, 5, tokens=100, shard=shard)
    whole = [(after, key(batch)) for after, batch in islice(stream.batches(), steps + 20)]
    start = whole[steps - 1][0] if steps else Cursor()
    resumed = TrainStream(ids, 5, tokens=100, shard=shard).batches(start)
    assert [(after, key(batch)) for after, batch in islice(resumed, 20)] == whole[steps:]


def test_a_pair_longer_than_a_batch_stands_alone(corpus: tuple[Ids, Rows]) -> None:
    batches = epoch(TrainStream(corpus[0], 1, tokens=17), 0)
    assert {len(key(batch)) for batch in batches if area(batch) > 17} == {1}
    assert max(area(batch) for batch in batches) == 18


def test_no_such_shard(corpus: tuple[Ids, Rows]) -> None:
    with pytest.raises(ValueError, match="shard"):
        TrainStream(corpus[0], 1, tokens=100, shard=(2, 2))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(4, 999), max_size=9), st.lists(st.integers(4, 999), max_size=9)),
        min_size=1,
        max_size=40,
    ),
    tokens=st.integers(10, 60),
    seed=st.integers(0, 5),
)
def test_any_corpus(tmp_path: Path, rows: Rows, tokens: int, seed: int) -> None:
    ids = split(tmp_path, rows)
    for batches in (epoch(TrainStream(ids, seed, tokens=tokens), 0), list(eval_batches(ids, tokens=tokens))):
        assert sorted(line for batch in batches for line in key(batch)) == list(range(len(rows)))
        for batch in batches:
            check(batch, rows)
            assert area(batch) <= tokens


def test_evaluation_goes_by_source_length_then_line(corpus: tuple[Ids, Rows]) -> None:
    ids, rows = corpus
    lines = [line for batch in eval_batches(ids, tokens=200) for line in key(batch)]
    assert lines == sorted(range(len(rows)), key=lambda line: (len(rows[line][0]), line))


def test_evaluation_takes_a_sentence_longer_than_a_batch_alone(tmp_path: Path) -> None:
    ids = split(tmp_path, [([5] * 30, [6]), ([7], [8]), ([7], [9])])
    assert [key(batch) for batch in eval_batches(ids, tokens=10)] == [[1, 2], [0]]


def test_evaluation_of_some_lines_and_of_so_many_at_a_time(corpus: tuple[Ids, Rows]) -> None:
    ids, rows = corpus
    chosen = np.arange(3, 1500, 7)
    batches = list(eval_batches(ids, tokens=10_000, rows=8, lines=chosen))
    assert [len(key(batch)) for batch in batches] == [8] * (len(chosen) // 8) + [len(chosen) % 8]
    lines = [line for batch in batches for line in key(batch)]
    assert lines == sorted(chosen.tolist(), key=lambda line: (len(rows[line][0]), line))
    whole = next(eval_batches(ids, tokens=10_000, lines=np.array([lines[0]])))
    assert torch.equal(whole.target_out[0], batches[0].target_out[0, : whole.target_out.shape[1]])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30)), st.integers(1, 60))
def test_cut_never_splits_what_fits(widths: list[int], tokens: int) -> None:
    bounds = cut(np.array(widths, np.int64), tokens)
    assert bounds[0] == 0
    assert bounds[-1] == len(widths)
    for first, end in pairwise(bounds):
        assert first < end
        part = widths[first:end]
        assert len(part) == 1 or len(part) * max(part) <= tokens
        if end < len(widths):
            assert (len(part) + 1) * max(*part, widths[end]) > tokens


def drawn(rows: int, source: int, target: int, fertility: bool = False) -> Batch:
    sides = [torch.arange(1, 1 + rows * length).view(rows, length) for length in (source, target)]
    valid = [torch.ones_like(side, dtype=torch.bool) for side in sides]
    given = torch.full_like(sides[0], 2) if fertility else None
    return Batch(sides[0], valid[0], sides[1], sides[1] + 1, valid[1], torch.arange(rows), given)


@given(rows=st.integers(1, 300), source=st.integers(1, 130), target=st.integers(1, 130), fertility=st.booleans())
def test_a_rounded_batch_holds_the_same_and_a_little_padding(rows: int, source: int, target: int, fertility: bool):
    batch = drawn(rows, source, target, fertility)
    more = rounded(batch)
    assert len(more.index) <= rows * 17 / 16
    assert more.source.shape[1] <= max(source, target) * 9 / 8
    assert more.source.shape[1] <= 1.5 * source
    assert more.target_in.shape[1] <= 1.5 * target
    for field in Batch._fields:
        before, after = getattr(batch, field), getattr(more, field)
        if before is None:
            assert after is None
            continue
        held = after[: len(before)] if before.dim() == 1 else after[: len(before), : before.shape[1]]
        assert torch.equal(held, before)
        beyond = after[len(before) :] if before.dim() == 1 else torch.cat(
            [after[len(before) :].flatten(), after[:, before.shape[1] :].flatten()]
        )  # fmt: skip
        assert (beyond == (-1 if field == "index" else 0)).all()
    again = rounded(more)
    assert [each.shape for each in again if each is not None] == [each.shape for each in more if each is not None]


def test_few_shapes_are_left_of_many():
    assert PAD == 0
    shapes = {rounded(drawn(4096 // length, length, other)).source.shape for length in range(20, 120)
              for other in (length, length - 1, length - 2)}  # fmt: skip
    assert len(shapes) < 60


@pytest.mark.parametrize("longest", [9, 10, 25, 26])
def test_no_side_is_rounded_past_what_a_model_reads(longest: int):
    more = rounded(drawn(3, 9, 25), longest)
    assert more.source.shape[1] == min(9, longest) if longest < 10 else more.source.shape[1] in (9, 10)
    assert more.target_in.shape[1] == max(25, min(26, longest))
