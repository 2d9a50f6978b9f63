from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnbench.core.errors import MissingExtraError
from attnbench.data.alignment.eflomal import align_eflomal
from attnbench.data.alignment.links import parse_links
from attnbench.data.datasets.demo import sentences


class Stub:
    """Takes the call that eflomal takes: links word i to word i, and in reverse the first source word to the last."""

    seen: tuple[list[str], list[str]] | None = None

    def align(self, sources, targets, *, links_filename_fwd: str, links_filename_rev: str) -> None:
        Stub.seen = sources, targets
        lengths = [(len(s.split()), len(t.split())) for s, t in zip(sources, targets, strict=True)]
        forward = [" ".join(f"{i}-{i}" for i in range(min(pair))) for pair in lengths]
        reverse = [f"0-{m - 1}" if n and m else "" for n, m in lengths]
        Path(links_filename_fwd).write_text("".join(f"{line}\n" for line in forward))
        Path(links_filename_rev).write_text("".join(f"{line}\n" for line in reverse))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    monkeypatch.setitem(sys.modules, "eflomal", SimpleNamespace(Aligner=Stub))
    monkeypatch.setattr(Stub, "seen", None)
    return Stub


def test_words_go_in_as_numbers_and_the_training_text_along(stub: type[Stub]):
    sources, targets = ["The a\u3000b", "", "the"], ["Das  A", "x", "das"]
    more = ["The the"], ["z"]
    assert align_eflomal(sources, targets, "forward", train=more) == [[(0, 0), (1, 1)], [], [(0, 0)]]
    assert stub.seen == (["0 1", "", "2", "0 2"], ["3 4", "5", "6", "7"])
    assert align_eflomal(sources, targets, "union", lowercase=True)[0] == [(0, 0), (0, 1), (1, 1)]
    assert stub.seen == (["0 1", "", "0"], ["2 3", "4", "2"])


def test_nothing_to_align_is_not_handed_on(stub: type[Stub]):
    assert align_eflomal([], []) == []
    assert align_eflomal(["", "a"], ["b", ""]) == [[], []]
    assert stub.seen is None


def test_absent_it_is_named_with_the_mend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "eflomal", None)
    with pytest.raises(MissingExtraError, match=r"eflomal is not installed; pip install 'attnbench\[align\]'"):
        align_eflomal(["a"], ["b"])


def test_bad_input_is_named(stub: type[Stub]):
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        align_eflomal(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="unknown method 'both'"):
        align_eflomal(["a"], ["b"], "both")  # pyright: ignore[reportArgumentType]


def test_the_real_one_finds_known_alignments():
    pytest.importorskip("eflomal", reason="eflomal is not installed")
    drawn = [sentence for _, sentence in sentences(1, {"train": 200, "valid": 0, "test": 0})]
    sources = [" ".join(each.source) for each in drawn]
    targets = [" ".join(word.text for word in each.target) for each in drawn]
    found = align_eflomal(sources, targets, "intersection")
    right = sum(len(set(ours) & set(parse_links(each.links()))) for ours, each in zip(found, drawn, strict=True))
    assert right / sum(map(len, found)) > 0.8
