from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from attnbench.core.errors import DataError
from attnbench.data.build import build, write_texts
from attnbench.data.datasets.base import DatasetSpec, Languages
from attnbench.data.parts import Part
from attnbench.data.recipe import Recipe
from attnbench.data.store import TextLines


class Corpus(DatasetSpec):
    """Of no release; `came_so`: whether what comes tokenised is so in the manner of Moses."""

    kind: Literal["corpus"] = "corpus"
    came_so: ClassVar = True

    def pair(self) -> Languages:
        return Languages("de", "en")

    def moses_words(self) -> bool:
        return self.came_so


class Otherwise(Corpus):
    came_so: ClassVar = False


def recipe(dataset: DatasetSpec | None = None, **fields: object) -> Recipe:
    return Recipe.model_validate({"dataset": dataset or Corpus(), "tokenizer": "word", "pretokenize": "none", **fields})


def part(folder: Path, stem: str, source: list[str], target: list[str], **fields: object) -> Part:
    paths = folder / f"{stem}.de", folder / f"{stem}.en"
    for path, lines in zip(paths, (source, target), strict=True):
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return Part(*paths)._replace(**fields)


def parts(folder: Path, source: list[str], target: list[str], **fields: object) -> Mapping[str, list[Part]]:
    """With validation and test of a line each."""
    held = {split: [part(folder, split, [f"{split} ."], [f"{split} ."])] for split in ("valid", "test")}
    return {"train": [part(folder, "train", source, target, **fields)], **held}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_pairs_at_the_bounds_are_kept(tmp_path: Path, out: Path) -> None:
    source = ["a b c d", "a b c d e", "a b", "a b"]
    target = ["a b c d", "a b", "a b c d", "a b c d e"]
    counts = write_texts(recipe(max_length=4, max_ratio=2), parts(tmp_path, source, target), out)
    assert list(TextLines(out / "train.src.txt")) == ["a b c d", "a b"]
    assert counts["train"] == {"read": 4, "kept": 2, "empty": 0, "too_long": 2, "ratio": 0}
    counts = write_texts(recipe(max_ratio=2), parts(tmp_path, source, target), out)
    assert counts["train"] == {"read": 4, "kept": 2, "empty": 0, "too_long": 0, "ratio": 2}


@pytest.mark.parametrize(("dataset", "reference"), [(Corpus(), "it is, yes."), (Otherwise(), "it is , yes .")])
def test_references_are_detokenised_where_moses_can_undo_them(
    tmp_path: Path, out: Path, dataset: DatasetSpec, reference: str
) -> None:
    given = {**parts(tmp_path, ["a"], ["a"]), "test": [part(tmp_path, "t", ["a"], ["it is , yes ."], tokenized=True)]}
    write_texts(recipe(dataset), given, out)
    assert list(TextLines(out / "test.tgt.raw")) == [reference]


@pytest.mark.parametrize(("repeated", "told"), [(1, False), (2, True)])
def test_a_hundredth_of_a_released_split_may_stand_in_the_training_text(
    tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture, repeated: int, told: bool
) -> None:
    lines = [f"wort {number}" for number in range(100)]
    given = {**parts(tmp_path, lines[:repeated], lines[:repeated]), "test": [part(tmp_path, "t", lines, lines)]}
    with caplog.at_level(logging.WARNING, "attnbench"):
        build(recipe(), given, out)
    assert ("of the 100 pairs of test stand in the training text too" in caplog.text) == told


def aligned(folder: Path, links: str, source: str, target: str, **fields: object) -> Mapping[str, list[Part]]:
    """Two pairs, of which the second has these links."""
    (folder / "train.align").write_text(f"0-0\n{links}\n")
    given = [["x", source], ["y", target]]
    return parts(folder, *given, alignment=folder / "train.align", **fields)


@pytest.mark.parametrize("links", ["2-0", "0-3"])
def test_a_link_to_the_word_behind_the_last_one_is_refused(tmp_path: Path, out: Path, links: str) -> None:
    write_texts(recipe(), aligned(tmp_path, "1-2", "a b", "c d e"), out)
    assert list(TextLines(out / "train.align")) == ["0-0", "1-2"]
    with pytest.raises(DataError, match=rf"train\.de:2: no words for {links}: source and target have 2 and 3"):
        write_texts(recipe(), aligned(tmp_path, links, "a b", "c d e"), out)


@pytest.mark.parametrize(("source", "target", "place"), [
    ("Haus, klein.", "house small", r"train\.de:2: has 2 words and, tokenised, 4"),
    ("Haus klein", "It's small", r"train\.en:2: has 2 words and, tokenised, 3"),
])  # fmt: skip
def test_links_of_words_that_are_split_are_refused(
    tmp_path: Path, out: Path, source: str, target: str, place: str
) -> None:
    """They would be those of other words."""
    given, moses = aligned(tmp_path, "0-0 1-1", source, target), recipe(pretokenize="moses")
    with pytest.raises(DataError, match=rf"{place}, so that the links of .*train\.align .*`tokenized: true` below"):
        write_texts(moses, given, out)
    for mended, how in ((given, recipe()), (aligned(tmp_path, "0-0 1-1", source, target, tokenized=True), moses)):
        write_texts(how, mended, out)
        assert list(TextLines(out / "train.align")) == ["0-0", "0-0 1-1"]
    write_texts(moses, aligned(tmp_path, "", source, target), out)  # no links, none that could be wrong
    assert list(TextLines(out / "train.align")) == ["0-0", ""]
