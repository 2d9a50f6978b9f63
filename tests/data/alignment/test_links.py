from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnbench.core.errors import DataError
from attnbench.data.alignment.links import (
    format_links,
    parse_gold,
    parse_links,
    read_gold,
    read_links,
    words,
    write_links,
)

link = st.tuples(st.integers(0, 200), st.integers(0, 200))


@given(st.lists(st.lists(link, max_size=8), max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, alignments):
    path = tmp_path_factory.getbasetemp() / "links"
    write_links(path, alignments)
    assert read_links(path) == alignments
    assert [parse_links(format_links(links)) for links in alignments] == alignments


def test_pharaohs_form(tmp_path: Path):
    write_links(tmp_path / "links", [[(0, 0), (1, 2)], [], [(10, 3)]])
    assert (tmp_path / "links").read_text() == "0-0 1-2\n\n10-3\n"
    assert parse_links("  1-2\t0-0 ") == [(1, 2), (0, 0)]


@pytest.mark.parametrize("word", ["1", "1-", "-1-2", "1-2-3", "1:2", "a-b", "1-2,", "1p2", "*1-2", "١-٢", "1_0-2"])
def test_malformed_links_name_file_line_and_mend(tmp_path: Path, word):
    path = tmp_path / "links"
    path.write_text(f"0-0\n0-0 {word}\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_links(path)
    assert str(caught.value).startswith(f"{path}:2: '{word}' is no link; write source-target")


def test_gold_in_both_forms_counted_from_0_or_1():
    gold = parse_gold("0-0 *1-2 2p1 1-1 *1-1 0p0")
    assert gold.sure == [(0, 0), (1, 1)]
    assert gold.possible == [(0, 0), (1, 1), (1, 2), (2, 1)]
    assert parse_gold("1-1 2p1", first=1) == ([(0, 0)], [(0, 0), (1, 0)])
    assert parse_gold("") == ([], [])


@pytest.mark.parametrize(("word", "first", "message"), [
    ("*1p2", 0, "is no link"), ("1q2", 0, "is no link"), ("1-*2", 0, "is no link"), ("0-1", 1, "count from 0"),
    ("3p0", 1, "count from 0"),
])  # fmt: skip
def test_malformed_gold_is_named(word, first, message):
    with pytest.raises(DataError, match=message) as caught:
        parse_gold(f"1-1 {word}", "gold:7", first=first)
    assert str(caught.value).startswith(f"gold:7: '{word}'")


def test_gold_belongs_to_its_text(tmp_path: Path):
    path = tmp_path / "gold"
    path.write_text("1-1 2p2\n\n")
    sources, targets = ["a b", ""], ["x y", "z"]
    assert read_gold(path, sources, targets, first=1) == [([(0, 0)], [(0, 0), (1, 1)]), ([], [])]
    with pytest.raises(DataError, match=r"gold:1: link 2-2 lies beyond .* 2 source and 2 target .*from 1\?"):
        read_gold(path, sources, targets)
    with pytest.raises(
        DataError, match=r"gold:1: link 2-2 lies beyond .* 1 source and 2 target words \(counted from 1\)$"
    ):
        read_gold(path, ["a", ""], targets, first=1)
    for first in (0, 1):  # and not that a link lies beyond a pair which is not its own
        with pytest.raises(DataError, match=r"gold:2: has no sentence pair; there are 1"):
            read_gold(path, sources[:1], targets[:1], first=first)
    with pytest.raises(DataError, match=r"gold: ends after line 2; each of the 3"):
        read_gold(path, [*sources, "c"], [*targets, "w"], first=1)


def test_only_the_space_parts_words():
    assert words("  a\u3000b  c\td ") == ["a\u3000b", "c\td"]
    assert words("") == []
