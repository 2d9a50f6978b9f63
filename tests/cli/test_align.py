"""`attnbench align`: links on stdout, in a file, scored against gold; an aligner kept for other text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from attnbench.data.datasets.demo import sentences

DRAWN = [sentence for _, sentence in sentences(1, {"train": 300, "valid": 0, "test": 40})]


@pytest.fixture(autouse=True)
def _text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """train.en and train.xx, test.en and test.xx with test.gold, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, part in (("test", DRAWN[:40]), ("train", DRAWN[40:])):
        Path(f"{name}.en").write_text("".join(" ".join(each.source) + "\n" for each in part))
        Path(f"{name}.xx").write_text("".join(" ".join(word.text for word in each.target) + "\n" for each in part))
    Path("test.gold").write_text("".join(each.links() + "\n" for each in DRAWN[:40]))


def test_links_of_every_line_on_stdout(invoke):
    result = invoke("align", "train.en", "train.xx", "--method", "forward")
    lines = result.stdout.split("\n")
    assert len(lines) == 301
    for line, each in zip(lines, DRAWN[40:], strict=False):
        links = [tuple(map(int, word.split("-"))) for word in line.split()]
        assert links == sorted(links)
        assert all(source < len(each.source) and target < len(each.target) for source, target in links)
    assert "word pairs" in result.stderr
    assert invoke("align", "train.en", "train.xx", "--method", "forward").stdout == result.stdout


def test_kept_for_other_text_and_scored(invoke):
    direct = invoke("align", "test.en", "test.xx", "--train", "train.en", "train.xx", "--save", "kept.npz")
    kept = invoke("align", "test.en", "test.xx", "--load", "kept.npz", "--out", "out/links")
    assert kept.stdout == ""
    assert Path("out/links").read_text() == direct.stdout
    scored = invoke("align", "test.en", "test.xx", "--load", "kept.npz", "--gold", "test.gold")
    values = dict(line.split() for line in scored.stdout.splitlines())
    assert list(values) == ["aer", "precision", "recall"]
    assert float(values["aer"]) < 0.3
    document = json.loads(
        invoke("align", "test.en", "test.xx", "--load", "kept.npz", "--gold", "test.gold", "--json").stdout
    )
    assert document["alignments"] == direct.stdout.splitlines()
    assert document["pairs"] == 40
    assert document["links"] == len(direct.stdout.split())
    assert document["aer"] == pytest.approx(float(values["aer"]), abs=1e-4)
    brief = json.loads(invoke("align", "test.en", "test.xx", "--load", "kept.npz", "--json", "--out", "l").stdout)
    assert brief == {"pairs": 40, "links": document["links"]}


def test_gold_counted_from_one(invoke):
    shifted = [
        " ".join("-".join(str(int(number) + 1) for number in link.split("-")) for link in line.split())
        for line in Path("test.gold").read_text().splitlines()
    ]
    Path("one.gold").write_text("".join(f"{line}\n" for line in shifted))
    first = invoke("align", "test.en", "test.xx", "--gold", "test.gold").stdout
    assert invoke("align", "test.en", "test.xx", "--gold", "one.gold", "--gold-first", 1).stdout == first
    assert "do the links count from 1?" in invoke("align", "test.en", "test.xx", "--gold", "one.gold", code=4).stderr


def test_case_is_ignored_where_asked(invoke):
    Path("upper.en").write_text(Path("train.en").read_text().upper())
    lower = invoke("align", "train.en", "train.xx", "--lowercase").stdout
    assert invoke("align", "upper.en", "train.xx", "--lowercase").stdout == lower


def test_empty_files_and_empty_lines(invoke):
    Path("a").write_text("")
    Path("b").write_text("x\n\ny z\n")
    Path("c").write_text("\nq\nr s\n")
    assert invoke("align", "b", "c").stdout == "\n\n0-0 1-1\n"
    empty = ("align", "a", "a", "--train", "b", "c")
    assert invoke(*empty).stdout == ""
    assert json.loads(invoke(*empty, "--gold", "a", "--json").stdout) == {
        "pairs": 0, "links": 0, "aer": None, "precision": None, "recall": None, "alignments": [],
    }  # fmt: skip
    assert invoke(*empty, "--gold", "a").stdout == "aer -\nprecision -\nrecall -\n"
    assert "nothing can be learned" in invoke("align", "a", "a", code=4).stderr


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["test.en", "train.xx"], 4, "has no partner"),
    (["test.en", "absent"], 4, "absent: cannot be read"),
    (["test.en", "test.xx", "--train", "train.en", "test.xx"], 4, "train.en:41: has no partner"),
    (["test.en", "test.xx", "--method", "grow-dig"], 2, "did you mean 'grow-diag'"),
    (["test.en", "test.xx", "--load", "test.en"], 4, "is no saved aligner"),
    (["test.en", "test.xx", "--load", "k", "--lowercase"], 2, "--load and --lowercase exclude each other"),
    (["test.en", "test.xx", "--aligner", "eflomal", "--save", "k"], 2, "eflomal keeps nothing"),
    (["test.en", "test.xx", "--aligner", "eflomal"], 3, "eflomal is not installed; pip install"),
    (["test.en", "test.xx", "--gold", "test.en"], 4, "test.en:1: "),
    (["test.en", "test.xx", "--train", "train.en"], 2, "requires 2 arguments"),
    (["test.en", "test.xx", "--gold-first", "1"], 2, "name them with --gold"),
    (["test.en", "test.xx", "--out", "test.en/links"], 2, "test.en is a file; name another place"),
    (["test.en", "test.xx", "--save", "."], 2, "--save .: this is a folder; name a file"),
])  # fmt: skip
def test_mistakes_are_named(invoke, monkeypatch, arguments, code, message):
    monkeypatch.setitem(sys.modules, "eflomal", None)
    result = invoke("align", *arguments, code=code)
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(("arguments", "message"), [
    (["--out", "test.en"], "--out test.en: this is the source text; name another file"),
    (["--save", "./test.xx"], "--save test.xx: this is its translation"),
    (["--train", "train.en", "train.xx", "--save", "train.en"], "--save train.en: this is the source text of --train"),
    (["--train", "train.en", "train.xx", "--out", "link"], "--out link: this is the translation of --train"),
    (["--gold", "test.gold", "--out", "test.gold"], "--out test.gold: this is the file of --gold"),
    (["--load", "kept.npz", "--out", "kept.npz"], "--out kept.npz: this is the file of --load"),
    (["--save", "new", "--out", "../here/new"], "--save new: this is the file of --out"),
])  # fmt: skip
def test_no_input_is_written_over(invoke, tree, tmp_path, monkeypatch, arguments, message):
    folder = tmp_path / "here"
    folder.mkdir()
    for path in list(tmp_path.glob("t*.*")):
        path.rename(folder / path.name)
    monkeypatch.chdir(folder)
    Path("link").symlink_to("train.xx")
    Path("kept.npz").write_bytes(b"kept")
    before = tree(folder)
    assert message in invoke("align", "test.en", "test.xx", *arguments, code=2).stderr
    assert tree(folder) == before


def test_a_device_may_stand_twice(invoke):
    invoke("align", "train.en", "train.xx", "--out", "/dev/null", "--save", "/dev/null")
