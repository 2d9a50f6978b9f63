"""Any documents: blocks within documents, whole documents held out, sentences alone where no block is asked for."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from attnbench.core.errors import DataError
from attnbench.data.corpus import Data
from attnbench.data.prepare import prepare, read_manifest
from attnbench.data.recipe import Recipe

TRAIN = {"source": "a.de", "target": "a.en"}


def dataset(**fields: object) -> dict[str, object]:
    return {"kind": "documents", "languages": ["de", "en"], "train": [TRAIN], **fields}


def give(given, stem: str, documents: int, sentences: int = 3) -> None:
    for end in ("de", "en"):
        lines = [
            f"<d>\n{''.join(f'{stem}{doc} {end} n{number}' + chr(10) for number in range(sentences))}"
            for doc in range(documents)
        ]
        given.text(f"{stem}.{end}", "".join(lines))


def test_sentences_are_joined_within_their_document(given, prepared) -> None:
    give(given, "a", 6)
    data = prepared(dataset(hold_every=3))
    train = data.split("train")
    assert train.source[0] == "a0 de n0 <sep> a0 de n1 <sep> a0 de n2"
    assert list(train.documents) == ["train-0/1", "train-0/4"]
    assert list(data.split("valid").documents) == ["train-0/3", "train-0/6"]
    assert list(data.split("test").references) == [
        "a1 en n0 <sep> a1 en n1 <sep> a1 en n2", "a4 en n0 <sep> a4 en n1 <sep> a4 en n2"
    ]  # fmt: skip
    separator = data.source_vocabulary.rows - 1
    assert train.ids.source[0].tolist().count(separator) == 2
    assert data.source_vocabulary.decode(train.ids.source[0].tolist()) == train.source[0]
    numbers = data.manifest["splits"]["train"]
    assert (numbers["pairs"], numbers["sentences"], numbers["longer"]) == (2, 6, 0)
    assert [entry["name"] for entry in data.manifest["sources"]] == ["a.de", "a.en"]


def test_an_empty_sentence_is_placed_in_the_file_that_was_given(given, prepared) -> None:
    given.text("a.de", "<d>\neins\nzwei\n" * 4)
    given.text("a.en", "<d>\none\ntwo\n" + "<d>\none\n\n" + "<d>\none\ntwo\n" * 2)
    with pytest.raises(DataError, match=r"a\.en: document 2: an empty sentence, whose partner is 'zwei'; fill it in"):
        prepared(dataset(hold_every=3), empty="error")


def test_a_vocabulary_too_small_for_blocks_says_a_number_that_will_do(given, prepared) -> None:
    give(given, "a", 6)
    with pytest.raises(DataError, match=r"ask for [0-9]+ rows or more, and one more for what separates") as caught:
        prepared(dataset(hold_every=3), tokenizer={"kind": "bpe", "vocab": 10})
    rows = int(str(caught.value).partition("ask for ")[2].split()[0]) + 1
    data = prepared(dataset(hold_every=3), tokenizer={"kind": "bpe", "vocab": rows})
    assert data.source_vocabulary.rows == rows


def test_a_small_block_cuts_documents(given, prepared) -> None:
    give(given, "a", 6)
    data = prepared(dataset(hold_every=3), block=8)
    sources = data.split("train").ids.source
    assert all(len(sources[line]) < 8 for line in range(len(sources)))
    assert list(data.split("train").documents).count("train-0/1") > 1


def test_without_blocks_a_pair_is_a_sentence(given, prepared) -> None:
    give(given, "a", 6)
    data = prepared(dataset(hold_every=3), block=None)
    assert list(data.split("valid").source) == [
        "a2 de n0",
        "a2 de n1",
        "a2 de n2",
        "a5 de n0",
        "a5 de n1",
        "a5 de n2",
    ]
    assert list(data.split("valid").documents) == ["train-0/3"] * 3 + ["train-0/6"] * 3


def test_sets_that_are_given(given, prepared) -> None:
    for stem in "avt":
        give(given, stem, 2)
    own = {split: [{"source": f"{stem}.de", "target": f"{stem}.en"}] for split, stem in (("valid", "v"), ("test", "t"))}
    data = prepared(dataset(**own))
    assert [len(data.split(split)) for split in ("train", "valid", "test")] == [2, 2, 2]
    assert data.split("test").documents[0] == "test-0/1"


def test_overlap_leaves_the_other_sentences_of_a_document(given, prepared) -> None:
    give(given, "a", 2)
    give(given, "v", 1)
    given.text("t.de", "<d>\na0 de n1\n")
    given.text("t.en", "<d>\nsomething else\n")
    own = {"valid": [{"source": "v.de", "target": "v.en"}], "test": [{"source": "t.de", "target": "t.en"}]}
    data = prepared(dataset(**own), overlap="drop")
    assert data.split("train").source[0] == "a0 de n0 <sep> a0 de n2"


def test_new_text_may_be_a_block(given, prepared) -> None:
    give(given, "a", 6)
    data = prepared(dataset(hold_every=3))
    assert data.tokenize(["Ja. <sep> Das & das."]) == ["Ja . <sep> Das &amp; das ."]
    assert data.detokenize(["yes . <sep> that &apos;s it ."]) == ["yes. <sep> that's it."]


def test_files_that_changed_are_prepared_again(given, prepared, tmp_path) -> None:
    give(given, "a", 6)
    prepared(dataset(hold_every=3))
    give(given, "a", 9)
    assert len(prepared(dataset(hold_every=3)).split("train")) == 3


def test_names_are_part_of_what_it_is_made_from(given, prepared, caplog) -> None:
    given.text("a.de", "".join(f"de {number}\n" for number in range(9)))
    given.text("a.en", "".join(f"en {number}\n" for number in range(9)))
    given.text("ids", "".join(f"{number // 2}\n" for number in range(9)))
    named = dataset(train=[{**TRAIN, "names": "ids"}], hold_every=3)
    data = prepared(named)
    assert [entry["name"] for entry in data.manifest["sources"]] == ["a.de", "a.en", "ids"]
    assert list(data.split("valid").documents) == ["train-0/2"]
    prepared(named)
    assert "preparing again" not in caplog.text


def test_held_documents_are_whole(given, prepared) -> None:
    """The bounds of training text do not apply to them."""
    for end in ("de", "en"):
        given.text(f"a.{end}", "".join(f"<d>\nd{document} {end}\nlong long long {end}\n" for document in range(3)))
    data = prepared(dataset(hold_every=3), max_length=3)
    assert data.split("train").source[0] == "d0 de"
    assert data.split("test").source[0] == "d1 de <sep> long long long de"
    assert data.split("valid").source[0] == "d2 de <sep> long long long de"


def test_too_few_documents_to_hold_any_out_are_counted(given, prepared) -> None:
    give(given, "a", 2)
    with pytest.raises(DataError, match=r"2 documents, was held out for valid; lower task\.dataset\.hold_every"):
        prepared(dataset(hold_every=3))


def test_what_is_wrong_is_said(given, prepared) -> None:
    with pytest.raises(DataError, match=r"no file .*a\.de"):
        prepared(dataset())
    with pytest.raises(ValidationError, match="needs the file of names"):
        Recipe.model_validate({"dataset": dataset(train=[{**TRAIN, "form": "names"}])})
    with pytest.raises(ValidationError, match="does not say where a document ends"):
        Recipe.model_validate({"dataset": "multi30k-de-en", "block": 512})
    with pytest.raises(ValidationError, match="has no use for `names`"):
        Recipe.model_validate({"dataset": dataset(train=[{**TRAIN, "form": "blank", "names": "ids"}])})
    chat = {"source": "a.json", "target": "a.json"}
    with pytest.raises(ValidationError, match="of a chat is English"):
        Recipe.model_validate({"dataset": dataset(languages=["de", "fr"], train=[chat])})


@pytest.mark.parametrize(("kind", "folder"), [("ted-doc", "IWSLT2017"), ("nc-doc", "NC-2016")])
def test_a_release_in_marked_lines(given, tmp_path, kind, folder) -> None:
    """Where the whole release stands, each corpus has its own folder, with files of the same names."""
    for place in ("IWSLT2017", "NC-2016"):
        for split in ("train", "dev", "test"):
            for side in ("en", "de"):
                name = f"{place}/concatenated_en2de_{split}_{side}.txt"
                given.text(name, f"<d>\n{place} {split} {side}.\n\nmore {side}\n<d>\nother {side}\n")
    raw = {"dataset": kind, "tokenizer": {"kind": "bpe", "vocab": 400}}
    path = prepare(Recipe.model_validate(raw), cache=tmp_path / "cache", source=given.folder)
    data = Data.open(path)
    assert data.split("train").source[0] == f"{folder} train en . <sep> more en"
    assert data.split("valid").target[0] == f"{folder} dev de . <sep> more de"
    assert len(data.split("test")) == 2
    assert read_manifest(path)["splits"]["train"]["dropped"]["empty"] == 1
    assert len(read_manifest(path)["sources"]) == 6


def test_released_files_that_are_missing_are_named(given, tmp_path) -> None:
    given.text("concatenated_en2de_train_en.txt", "<d>\na\n")
    with pytest.raises(DataError, match=r"concatenated_en2de_dev_en\.txt"):
        prepare(Recipe.model_validate({"dataset": "ted-doc"}), cache=tmp_path / "cache", source=given.folder)
