from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.core.errors import DataError
from attnbench.data.parts import Part, read_pairs


def files(folder: Path, source: str, target: str, links: str | None = None) -> Part:
    (folder / "a.de").write_text(source)
    (folder / "a.en").write_text(target)
    if links is None:
        return Part(folder / "a.de", folder / "a.en")
    (folder / "a.align").write_text(links)
    return Part(folder / "a.de", folder / "a.en", alignment=folder / "a.align")


def test_pairs_keep_their_line_numbers(tmp_path: Path) -> None:
    pairs = list(read_pairs(files(tmp_path, "ja\nnein\n", "yes\nno\n", "0-0\n \n")))
    assert [(pair.source.text, pair.target.text, pair.target.number, pair.alignment) for pair in pairs] == [
        ("ja", "yes", 1, "0-0"),
        ("nein", "no", 2, ""),
    ]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("a\nb\nc\nd\n", "a\nb\n", r"a\.de:3: has no partner: .*a\.de has 4 lines and .*a\.en has 2;.*aligned"),
        ("a\n", "a\nb\nc\n", r"a\.en:2: has no partner: .*a\.de has 1 lines and .*a\.en has 3;.*aligned"),
        ("", "a\n", r"a\.en:1: has no partner"),
    ],
)
def test_unequal_counts_name_both_and_the_first_line_alone(tmp_path: Path, source: str, target: str, message: str):
    with pytest.raises(DataError, match=message):
        list(read_pairs(files(tmp_path, source, target)))


def test_alignments_must_be_as_many(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.align: ends before line 2"):
        list(read_pairs(files(tmp_path, "a\nb\n", "a\nb\n", "0-0\n")))
    with pytest.raises(DataError, match=r"a\.align:2: has no pair"):
        list(read_pairs(files(tmp_path, "a\n", "a\n", "0-0\n0-0\n")))
