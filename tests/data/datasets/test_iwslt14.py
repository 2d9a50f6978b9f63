from __future__ import annotations

import pytest

from attnbench.core.errors import DataError

TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")


def tagged(word: str, count: int) -> str:
    head = "<url>http://x</url>\n<keywords>a, b</keywords>\n<talkid>1</talkid>\n<title>Der Titel</title>\n"
    return head + "".join(f"Das {word} Nummer {number} ist's .\n" for number in range(count - 1))


def xml(word: str) -> str:
    return f'<doc docid="1">\n<title>kein Satz</title>\n<seg id="1"> Das {word} ist’s. </seg>\n</doc>\n'


def released(train: int) -> dict[str, str]:
    members = {f"de-en/train.tags.de-en.{side}": tagged(side, train) for side in ("de", "en")}
    for name in TESTS:
        members |= {f"de-en/IWSLT14.{name}.de-en.{side}.xml": xml(f"{name} {side}") for side in ("de", "en")}
    return members


@pytest.mark.parametrize("as_archive", [True, False])
def test_the_release_becomes_fairseqs_splits(given, prepared, as_archive: bool) -> None:
    members = released(50)
    if as_archive:
        given.pack("de-en.tgz", members)
    else:
        for name, text in members.items():
            given.text(f"{name}.gz", text)
    data = prepared("iwslt14-de-en")
    assert {split: len(data.split(split)) for split in ("train", "valid", "test")} == {
        "train": 48,
        "valid": 2,
        "test": 5,
    }
    # fairseq: awk '{if (NR%23 == 0) print}' of the clean lines; the first line is the title
    assert list(data.split("valid").source) == ["das de nummer 21 ist &apos; s .", "das de nummer 44 ist &apos; s ."]
    assert data.split("train").target[0] == "der titel"
    assert data.split("train").source[22] == "das de nummer 22 ist &apos; s ."
    assert list(data.split("test").references) == [f"Das {name} en ist's." for name in TESTS]


def test_every_23rd_is_counted_after_the_filter(given, prepared) -> None:
    members = released(30)
    lines = members["de-en/train.tags.de-en.de"].splitlines()
    lines[10] = "lang " * 176
    members["de-en/train.tags.de-en.de"] = "\n".join(lines) + "\n"
    given.pack("de-en.tgz", members)
    data = prepared("iwslt14-de-en")
    assert list(data.split("valid").source) == ["das de nummer 22 ist &apos; s ."]
    assert data.manifest["splits"]["train"]["dropped"]["too_long"] == 1


@pytest.mark.parametrize("name", ["{split}.{side}", "{split}.de-en.{side}"])
def test_text_prepared_earlier_is_taken_as_it_is(given, prepared, name: str) -> None:
    for split in ("train", "valid", "test"):
        for side in ("de", "en"):
            given.text(name.format(split=split, side=side), "das ist &apos;s , ja@@ wohl !\nein haus@@ tier .\n")
    data = prepared("iwslt14-de-en")
    assert list(data.split("train").source) == ["das ist &apos;s , jawohl !", "ein haustier ."]
    assert data.split("test").references[0] == "das ist's, jawohl!"
    assert [len(data.split(split)) for split in ("train", "valid", "test")] == [2, 2, 2]


def test_text_prepared_earlier_is_of_one_corpus(given, prepared) -> None:
    """Files of these names lie beside other corpora, too."""
    for split in ("train", "valid", "test"):
        for side in ("de", "en"):
            text = f"{split} von hier .\n"
            given.text(f"ted/{split}.{side}", text)
            if split != "test":
                given.text(f"other/{split}.{side}", "ein anderes .\n" * 9)
    data = prepared("iwslt14-de-en")
    assert list(data.split("train").source) == ["train von hier ."]


def test_splits_of_several_corpora_are_refused(given, prepared) -> None:
    for split, folder in (("train", "multi30k"), ("valid", "ted"), ("test", "ted")):
        for side in ("de", "en"):
            given.text(f"{folder}/{split}.{side}", "ein satz .\n")
    with pytest.raises(DataError, match=r"lie in several folders \(.*multi30k, .*ted\), and any corpus has files"):
        prepared("iwslt14-de-en")


def test_without_training_text_both_forms_and_the_archive_are_named(given, prepared) -> None:
    given.text("valid.de", "a\n")
    with pytest.raises(DataError) as caught:
        prepared("iwslt14-de-en")
    assert "  train.tags.de-en.de (plain, .gz or .xz)" in str(caught.value).splitlines()
    assert "  or the archives de-en.tgz" in str(caught.value).splitlines()
