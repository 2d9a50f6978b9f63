from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.core.errors import DataError

TRAIN = {"source": "a.de", "target": "a.en"}


def dataset(**fields: object) -> dict[str, object]:
    return {"kind": "parallel", "languages": ["de", "en"], "train": TRAIN, **fields}


def give(given, stem: str, count: int, ends: tuple[str, str] = ("de", "en")) -> None:
    for end in ends:
        given.text(f"{stem}.{end}", "".join(f"{stem} {end[:2]} {number}\n" for number in range(count)))


def test_packed_files_by_their_path(given, prepared) -> None:
    give(given, "a", 20, ("de.gz", "en.xz"))
    data = prepared(dataset(train={"source": "a.de.gz", "target": "a.en.xz"}, hold_every=10))
    assert [len(data.split(split)) for split in ("train", "valid", "test")] == [16, 2, 2]
    assert list(data.split("valid").source) == ["a de 9", "a de 19"]
    assert list(data.split("test").source) == ["a de 8", "a de 18"]


def test_a_set_that_is_given_is_not_held_out(given, prepared) -> None:
    give(given, "a", 20)
    give(given, "v", 3)
    data = prepared(dataset(valid={"source": "v.de", "target": "v.en"}, hold_every=10))
    assert list(data.split("valid").source) == ["v de 0", "v de 1", "v de 2"]
    assert [len(data.split(split)) for split in ("train", "test")] == [18, 2]
    assert "a de 9" in list(data.split("train").source)


def test_all_three_given(given, prepared) -> None:
    for stem in "avt":
        give(given, stem, 4)
    files = {split: {"source": f"{stem}.de", "target": f"{stem}.en"} for split, stem in (("valid", "v"), ("test", "t"))}
    data = prepared(dataset(**files))
    assert [len(data.split(split)) for split in ("train", "valid", "test")] == [4, 4, 4]


def test_paths_from_the_working_directory(given, prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    give(given, "sub/a", 10)
    monkeypatch.chdir(tmp_path / "given")
    train = {"source": "sub/a.de", "target": str(tmp_path / "given/sub/a.en")}
    assert len(prepared(dataset(train=train, hold_every=5)).split("train")) == 6


def test_alignments_follow_their_lines(given, prepared) -> None:
    give(given, "a", 10)
    given.text("a.align", "".join(f"{number % 3}-{number // 5}\n" for number in range(10)))
    data = prepared(dataset(train=TRAIN | {"alignment": "a.align"}, hold_every=5))
    assert list(data.split("valid").alignments) == ["1-0", "0-1"]
    assert list(data.split("train").alignments)[:4] == ["0-0", "1-0", "2-0", "2-1"]


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ("0-x", r"a\.align, beside .*a\.de:3: '0-x' is no link"),
        ("0-0 9-0", r"a\.de:3: no words for 9-0: .* have 3 and 3"),
    ],
)
def test_alignments_that_fit_no_words_are_refused(given, prepared, links: str, words: str) -> None:
    give(given, "a", 10)
    given.text("a.align", "".join((links if number == 2 else "0-0") + "\n" for number in range(10)))
    with pytest.raises(DataError, match=words):
        prepared(dataset(train=TRAIN | {"alignment": "a.align"}, hold_every=5))


def test_a_split_without_alignments_has_none(given, prepared) -> None:
    give(given, "a", 10)
    give(given, "v", 3)
    given.text("a.align", "0-0\n" * 10)
    train = TRAIN | {"alignment": "a.align"}
    data = prepared(dataset(train=train, valid={"source": "v.de", "target": "v.en"}, hold_every=5))
    assert data.split("valid").alignments is None
    assert len(data.split("test").alignments) == 2


def test_tokenised_text_is_left_alone_and_can_be_undone(given, prepared) -> None:
    given.text("a.de", "das ist &apos;s , ja .\n" * 10)
    given.text("a.en", "that &apos;s it .\n" * 10)
    data = prepared(dataset(tokenized=True, hold_every=5))
    assert data.split("test").source[0] == "das ist &apos;s , ja ."
    assert data.split("test").references[0] == "that's it."


def test_an_absent_file_is_named_with_the_mend(given, prepared) -> None:
    give(given, "a", 3, ("de",))
    with pytest.raises(DataError, match=r"no file .*given/a\.en or .*a\.en; correct the path in task\.dataset, or"):
        prepared(dataset())


def test_held_out_pairs_that_the_training_text_repeats_are_told(given, prepared, caplog) -> None:
    lines = [f"wort {number}" for number in range(20)]
    lines[9] = lines[3]  # held out for valid; so is line 19
    given.text("a.de", "".join(f"{line}\n" for line in lines))
    given.text("a.en", "".join(f"{line}\n" for line in lines))
    data = prepared(dataset(hold_every=10))
    assert {split: facts.get("in_train") for split, facts in data.manifest["splits"].items()} == {
        "train": None, "valid": 1, "test": 0,
    }  # fmt: skip
    assert "parallel: 1 of the 2 pairs held out for valid stand in the training text too" in caplog.text
    assert "held out for test" not in caplog.text


def test_a_source_with_another_target_is_another_pair(given, prepared, caplog) -> None:
    give(given, "a", 10)
    given.text("a.de", "gleich\n" * 10)
    data = prepared(dataset(hold_every=5))
    assert [data.manifest["splits"][split]["in_train"] for split in ("valid", "test")] == [0, 0]
    assert "training text too" not in caplog.text


def test_more_training_text_comes_after_the_first(given, prepared) -> None:
    give(given, "a", 4)
    give(given, "b", 6)
    for stem in "vt":
        give(given, stem, 2)
    files = {split: {"source": f"{stem}.de", "target": f"{stem}.en"} for split, stem in (("valid", "v"), ("test", "t"))}
    more = [{"source": "b.de", "target": "b.en"}, {"source": "a.de", "target": "a.en"}]
    data = prepared(dataset(more=more, **files))
    assert list(data.split("train").source) == [
        *(f"a de {number}" for number in range(4)),
        *(f"b de {number}" for number in range(6)),
        *(f"a de {number}" for number in range(4)),
    ]
    held = prepared(dataset(more=more[:1], hold_every=5))
    assert list(held.split("valid").source) == ["b de 0", "b de 5"]  # counted on from one text to the next


def test_alignments_of_some_of_the_text_are_refused(given, prepared) -> None:
    give(given, "a", 4)
    more = [{"source": "a.de", "target": "a.en", "alignment": "a.align"}]
    with pytest.raises(ValueError, match="give all of them, or none"):
        prepared(dataset(more=more))


def test_pairs_of_the_training_text_that_are_tested_on_can_be_left_out(given, prepared, caplog) -> None:
    given.text("a.de", "eins\nzwei\ndrei\nvier\n")
    given.text("a.en", "one\ntwo\nthree\nfour\n")
    given.text("a.align", "0-0\n0-0\n0-0\n0-0 \n")
    given.text("v.de", "zwei\nfünf\n")
    given.text("v.en", "other\nfive\n")
    given.text("t.de", "anders\n")
    given.text("t.en", "three\n")
    files = {split: {"source": f"{stem}.de", "target": f"{stem}.en"} for split, stem in (("valid", "v"), ("test", "t"))}
    train = TRAIN | {"alignment": "a.align"}
    data = prepared(dataset(train=train, **files), overlap="drop")
    assert list(zip(data.split("train").source, data.split("train").target, strict=True)) == [
        ("eins", "one"), ("vier", "four"),
    ]  # fmt: skip
    assert list(data.split("train").alignments) == ["0-0", "0-0"]
    assert data.manifest["splits"]["train"] | {"pairs": 2} == data.manifest["splits"]["train"]
    assert data.manifest["splits"]["train"]["dropped"] == {"empty": 0, "too_long": 0, "ratio": 0, "overlap": 2}
    assert not [path for path in data.path.iterdir() if path.is_dir()]
    held = [f"wort {number % 9}" for number in range(20)]  # the tenth and the last are held out
    given.text("a.de", "".join(f"{line}\n" for line in held))
    given.text("a.en", "".join(f"{line}\n" for line in held))
    repeated = prepared(dataset(hold_every=10), overlap="drop")
    assert not set(repeated.split("train").source) & {*repeated.split("valid").source, *repeated.split("test").source}
    assert "training text too" not in caplog.text


def test_an_overlap_that_leaves_nothing_is_told(given, prepared) -> None:
    for stem in "avt":
        given.text(f"{stem}.de", "eins\n")
        given.text(f"{stem}.en", "one\n")
    files = {split: {"source": f"{stem}.de", "target": f"{stem}.en"} for split, stem in (("valid", "v"), ("test", "t"))}
    with pytest.raises(DataError, match="overlap: keep"):
        prepared(dataset(**files), overlap="drop")
