from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.errors import DataError
from attnbench.data.finder import Finder, bare


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_packed_and_nested_files_are_found_by_their_bare_name(tmp_path: Path) -> None:
    make(tmp_path, "deep/er/train.de.gz", "train.en.xz", "deep/train.en", ".hidden/val.de", ".train.de")
    finder = Finder([tmp_path])
    assert finder.find("val.de") is None
    assert finder.find("train.de") == tmp_path / "deep/er/train.de.gz"
    assert finder.find("train.en.gz") == tmp_path / "train.en.xz"
    assert finder.find("nothing", "train.de.gz") == tmp_path / "deep/er/train.de.gz"
    assert bare("a.b.gz") == "a.b"


def test_a_name_may_say_its_folder(tmp_path: Path) -> None:
    make(tmp_path, "data/orig/dev.ja", "data/tok/dev.ja.gz")
    finder = Finder([tmp_path])
    assert finder.find("tok/dev.ja") == tmp_path / "data/tok/dev.ja.gz"
    assert finder.find("dev.ja") == tmp_path / "data/orig/dev.ja"
    assert finder.find("data/dev.ja") is None


def test_all_missing_names_are_kept(tmp_path: Path) -> None:
    make(tmp_path, "a.de")
    finder = Finder([tmp_path])
    assert finder.pair(["a.de"], ["a.en", "b.en"])[0] == tmp_path / "a.de"
    finder.pair(["c.de"], ["c.en"])
    assert finder.missing == ["a.en or b.en", "c.de", "c.en"]


def test_the_two_files_of_a_part_are_of_one_corpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every pair of languages has its own English, under one name."""
    make(tmp_path, "cs-en/train.cs", "cs-en/train.en", "de-en/train.de", "de-en/train.en", "fr/train.fr")
    make(tmp_path, "apart/dev.de", "en/dev.en")
    finder = Finder([tmp_path])
    assert finder.pair(["train.de"], ["train.en"]) == (tmp_path / "de-en/train.de", tmp_path / "de-en/train.en")
    assert finder.pair(["train.en"], ["train.de"]) == (tmp_path / "de-en/train.en", tmp_path / "de-en/train.de")
    assert finder.pair(["dev.de"], ["dev.en"]) == (tmp_path / "apart/dev.de", tmp_path / "en/dev.en")
    assert caplog.text == ""
    assert finder.pair(["train.fr"], ["train.en"]) == (tmp_path / "fr/train.fr", tmp_path / "cs-en/train.en")
    assert "lie in two folders" in caplog.text
    assert finder.missing == []


def test_parts_of_one_corpus_are_taken_from_one_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = {part: [[f"{part}.de"], [f"{part}.en"]] for part in ("train", "valid")}
    make(
        tmp_path, "a/train.de", "a/train.en", "deep/b/train.de", "deep/b/train.en", "deep/b/valid.de", "deep/b/valid.en"
    )
    files = Finder([tmp_path])
    assert files.pair(*names["train"])[0] == tmp_path / "a/train.de"  # nearest the top
    b = tmp_path / "deep/b"
    assert files.pairs(names) == {part: (b / f"{part}.de", b / f"{part}.en") for part in names}
    assert not caplog.records
    (b / "train.en").unlink()
    found = Finder([tmp_path]).pairs(names)
    assert (found["train"][0].parent, found["valid"][0].parent) == (tmp_path / "a", b)
    assert "lie in several folders: see that they are of one corpus" in caplog.text
    caplog.clear()
    (b / "valid.en").unlink()
    files = Finder([tmp_path])
    files.pairs(names)
    assert files.missing == ["valid.en"]
    assert not caplog.records


def test_an_earlier_folder_goes_first(tmp_path: Path) -> None:
    make(tmp_path, "one/a", "two/a")
    assert Finder([tmp_path / "two", tmp_path / "one"]).find("a") == tmp_path / "two/a"


def test_a_folder_that_may_not_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.de").touch()
    real = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    files = Finder([tmp_path])
    assert files.find("open.de") is not None
    assert files.find("closed.de") is None


def test_a_folder_that_may_be_listed_and_not_entered_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "open.de", "closed/in/train.de", "closed/train.de")
    real = os.stat

    def stat(path: Any, *args: Any, **named: Any) -> os.stat_result:
        if "closed" in Path(path).parent.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **named)

    monkeypatch.setattr(os, "stat", stat)
    files = Finder([tmp_path])
    assert files.find("open.de") is not None
    assert files.find("train.de") is None


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: no such folder"):
        Finder([tmp_path / "absent"])
