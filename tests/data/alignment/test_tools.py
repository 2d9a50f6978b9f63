from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.errors import DataError, MissingExtraError, SpecError
from attnbench.data.alignment.model import Aligner
from attnbench.data.alignment.tools import Sides, align_text, method_of, read_sides

TEXT = Sides(["a b", "b", "A"], ["x y", "y", "x"])
MORE = Sides(["b a", "b", "c"], ["y x", "y", "z"])


def test_a_text_teaches_itself_or_another_does():
    assert align_text(TEXT) == Aligner.train(*TEXT).align(*TEXT)
    assert align_text(TEXT, "forward") == Aligner.train(*TEXT).align(*TEXT, "forward")
    assert align_text(TEXT, "union", train=MORE, lowercase=True) == Aligner.train(*MORE, lowercase=True).align(
        *TEXT, "union"
    )


def test_what_was_saved_aligns_as_it_did(tmp_path: Path):
    found = align_text(TEXT, "forward", train=MORE, save=tmp_path / "kept")
    assert align_text(TEXT, "forward", load=tmp_path / "kept") == found
    assert set(Aligner.load(tmp_path / "kept").directions) == {"forward", "reverse"}  # for every method


def test_options_that_exclude_each_other_are_named(tmp_path: Path):
    kept = tmp_path / "kept"
    with pytest.raises(SpecError, match="--load and --train exclude each other"):
        align_text(TEXT, load=kept, train=MORE)
    with pytest.raises(SpecError, match="--load and --lowercase exclude each other"):
        align_text(TEXT, load=kept, lowercase=True)
    with pytest.raises(SpecError, match="--load and --save exclude each other"):
        align_text(TEXT, load=kept, save=kept)
    with pytest.raises(SpecError, match="--save: eflomal keeps nothing"):
        align_text(TEXT, tool="eflomal", save=kept)
    with pytest.raises(SpecError, match="--load: eflomal keeps nothing"):
        align_text(TEXT, tool="eflomal", load=kept)


@pytest.mark.parametrize("pairless", [Sides([], []), Sides(["a", " ", ""], ["", "x", ""])])
@pytest.mark.parametrize("tool", ["ibm2", "eflomal"])
def test_text_without_word_pairs_teaches_nothing(pairless: Sides, tool: Any):
    with pytest.raises(DataError, match=r"^the text: no line has words on both sides"):
        align_text(pairless, tool=tool)
    with pytest.raises(DataError, match=r"^--train: no line has words on both sides"):
        align_text(pairless if tool == "eflomal" else TEXT, tool=tool, train=pairless)


def test_text_without_words_can_be_linked_by_what_was_learned(tmp_path: Path):
    align_text(TEXT, save=tmp_path / "kept")
    assert align_text(Sides(["", "a"], ["x", ""]), load=tmp_path / "kept") == [[], []]


def test_eflomal_is_asked_for_and_absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "eflomal", None)
    with pytest.raises(MissingExtraError):
        align_text(TEXT, tool="eflomal")


def test_sides_have_equally_many_lines(tmp_path: Path):
    (tmp_path / "a").write_text("a b\n\nc\n")
    (tmp_path / "b").write_text("x\ny\n")
    (tmp_path / "c").write_text("x\ny\nz\n")
    assert read_sides(tmp_path / "a", tmp_path / "c") == (["a b", "", "c"], ["x", "y", "z"])
    with pytest.raises(DataError, match=r"a:3: has no partner: .* 3 lines and .* 2"):
        read_sides(tmp_path / "a", tmp_path / "b")


def test_the_nearest_method_is_named():
    assert method_of("grow-diag-final-and") == "grow-diag-final-and"
    with pytest.raises(SpecError, match="unknown method 'grow-diag-finaland'; did you mean 'grow-diag-final-and'"):
        method_of("grow-diag-finaland")
