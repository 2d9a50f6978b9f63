from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnbench.data.store import IdLists, IdsWriter, TextLines, TextWriter, ids_dtype

LINES = st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n")), max_size=20)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(path: Path, lines: list[str]) -> int:
    with TextWriter(path) as writer:
        for line in lines:
            writer.write(line)
    return writer.rows


@quick
@given(lines=LINES)
def test_lines_come_back_by_number(tmp_path: Path, lines: list[str]) -> None:
    assert written(tmp_path / "a.txt", lines) == len(lines)
    read = TextLines(tmp_path / "a.txt")
    assert len(read) == len(lines)
    assert list(read) == lines
    assert [read[i] for i in range(len(lines))] == lines
    assert read[1:5:2] == lines[1:5:2]
    assert (tmp_path / "a.txt").read_bytes() == "".join(line + "\n" for line in lines).encode()


def test_negative_and_absent_lines(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", ["x", "y"])
    read = TextLines(tmp_path / "a.txt")
    assert read[-1] == "y"
    with pytest.raises(IndexError):
        read[2]
    with pytest.raises(IndexError):
        read[-3]


@quick
@given(rows=st.lists(st.lists(st.integers(0, 99_999), max_size=6), min_size=1, max_size=20), data=st.data())
def test_ids_are_gathered_in_any_order(tmp_path: Path, rows: list[list[int]], data: st.DataObject) -> None:
    with IdsWriter(tmp_path / "a.ids", 100_000) as writer:
        writer.write(rows[:5])
        writer.write(rows[5:])
    read = IdLists(tmp_path / "a.ids", 100_000)
    assert [read[i].tolist() for i in range(len(read))] == rows
    index = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)), np.int64)
    ids, first, lengths = read.gather(index)
    assert [ids[a : a + size].tolist() for a, size in zip(first, lengths, strict=True)] == [rows[i] for i in index]
    assert len(ids) == sum(len(rows[i]) for i in index)


def test_many_rows_are_gathered_in_visits(tmp_path: Path) -> None:
    rows = [[number] * (number % 4) for number in range(1000)]
    with IdsWriter(tmp_path / "a.ids", 1000) as writer:
        writer.write(rows)
    index = np.random.default_rng(1).permutation(1000)
    ids, first, lengths = IdLists(tmp_path / "a.ids", 1000).gather(index)
    assert [ids[a : a + size].tolist() for a, size in zip(first, lengths, strict=True)] == [rows[i] for i in index]


def test_pages_are_given_back_between_visits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of a large corpus would else hold all of its files."""
    with IdsWriter(tmp_path / "a.ids", 1000) as writer:
        writer.write([[number] for number in range(1000)])
    lists, released = IdLists(tmp_path / "a.ids", 1000), []
    monkeypatch.setattr(lists, "release", lambda: released.append(1))
    lists.gather(np.arange(1000))
    assert len(released) == 4


def test_ids_take_two_bytes_up_to_65536_rows(tmp_path: Path) -> None:
    assert ids_dtype(65_536).itemsize == 2
    assert ids_dtype(65_537).itemsize == 4
    with IdsWriter(tmp_path / "a.ids", 65_536) as writer:
        writer.write([[65_535, 0]])
    assert (tmp_path / "a.ids").stat().st_size == 4
    assert IdLists(tmp_path / "a.ids", 65_536)[0].tolist() == [65_535, 0]


def test_an_id_beyond_the_vocabulary_is_never_wrapped(tmp_path: Path) -> None:
    with pytest.raises(OverflowError), IdsWriter(tmp_path / "a.ids", 10) as writer:
        writer.write([[4], [70_000]])


def test_offsets_beyond_one_buffer(tmp_path: Path) -> None:
    count = (1 << 16) + 10
    with TextWriter(tmp_path / "a.txt") as writer:
        for number in range(count):
            writer.write(str(number))
    read = TextLines(tmp_path / "a.txt")
    assert len(read) == count
    assert read[count - 1] == str(count - 1)
    assert sum(1 for _ in read) == count
