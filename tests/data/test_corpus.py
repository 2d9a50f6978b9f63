from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from attnbench.core.errors import DataError
from attnbench.data.corpus import Data
from attnbench.data.fertility import with_fertilities
from attnbench.data.prepare import prepare
from attnbench.data.recipe import Recipe

GERMAN = ['Ein Haus & "ein" Hof.', "Die Katze schläft.", "Das ist's, ja!"] * 4
ENGLISH = ['A house & a "yard".', "The cat doesn't sleep.", "That's it, yes!"] * 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("text")
    for name, lines in (("a.de", GERMAN), ("a.en", ENGLISH)):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    dataset = {
        "kind": "parallel",
        "languages": ["de", "en"],
        "train": {"source": "a.de", "target": "a.en"},
        "hold_every": 6,
    }
    raw = {"dataset": dataset, "tokenizer": {"kind": "bpe", "vocab": 150}, "lowercase": True}
    return Data.open(prepare(Recipe.model_validate(raw), cache=folder / "cache", source=folder))


def test_lines_tokenised_and_as_given(small: Data) -> None:
    test = small.split("test")
    assert len(test) == len(test.source) == 2
    assert test.source[0] == "die katze schläft ."
    assert test.target[0] == "the cat doesn &apos;t sleep ."
    assert test.references[0] == "The cat doesn't sleep."
    assert small.languages == ("de", "en")
    assert small.detokenize([test.target[0]]) == ["the cat doesn't sleep."]


def test_vocabularies_turn_ids_into_lines(small: Data) -> None:
    test = small.split("test")
    for number, line in enumerate(test.target):
        ids = test.ids.target[number].tolist()
        assert small.target_vocabulary.encode(line) == ids
        assert small.target_vocabulary.decode(ids) == line
    assert small.source_vocabulary is small.target_vocabulary
    assert small.source_vocabulary.rows == 150


def test_new_text_is_tokenised_as_the_recipe_says(small: Data) -> None:
    assert small.tokenize(GERMAN[:2]) == ["ein haus &amp; &quot; ein &quot; hof .", "die katze schläft ."]
    assert small.tokenize(["That's"], "en") == ["that &apos;s"]


def test_batches_hold_the_lines_they_name(small: Data) -> None:
    train = small.split("train")
    for _, batch in islice(small.batches(1, tokens=60), 5):
        for row, line in enumerate(batch.index.tolist()):
            ids = batch.target_out[row][batch.target_valid[row]].tolist()
            assert small.target_vocabulary.decode(ids) == train.target[line]
    lines = [line for batch in small.eval_batches("valid", tokens=60) for line in batch.index.tolist()]
    assert sorted(lines) == list(range(len(small.split("valid"))))


def test_a_pair_longer_than_a_batch_is_named_before_training(tmp_path: Path) -> None:
    lines = [f"wort {number % 7}" for number in range(40)]
    lines[20] = f"ok {''.join(random.Random(1).choices('acgt', k=200))}"
    for end in ("de", "en"):
        (tmp_path / f"a.{end}").write_text("\n".join(lines) + "\n")
    dataset = {"kind": "parallel", "languages": ["de", "en"], "train": {"source": "a.de", "target": "a.en"}}
    raw = {"dataset": {**dataset, "hold_every": 30}, "tokenizer": {"kind": "bpe", "vocab": 60}, "max_length": 2}
    data = Data.open(prepare(Recipe.model_validate(raw), cache=tmp_path / "cache", source=tmp_path))
    widest = data.split("train").ids.widest
    with pytest.raises(
        DataError,
        match=rf"training pair 21 of 38 has {widest} tokens, and a batch holds {widest - 1}: raise train\.batch_tokens,"
        rf" or remove that line from the text, or split it or a long word of it; it begins '{lines[20][:60]}\.\.\.'",
    ):
        data.batches(1, tokens=widest - 1)
    next(data.batches(1, tokens=widest))


def test_of_two_long_sides_the_longer_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.de").write_text("eins\n" * 9 + "zwei drei\n")
    (tmp_path / "a.en").write_text("one\n" * 9 + "two and three\n")
    dataset = {"kind": "parallel", "languages": ["de", "en"], "train": {"source": "a.de", "target": "a.en"}}
    raw = {"dataset": {**dataset, "hold_every": 4}, "tokenizer": "word"}
    data = Data.open(prepare(Recipe.model_validate(raw), cache=tmp_path / "cache", source=tmp_path))
    with pytest.raises(DataError, match=r"training pair 6 of 6 has 4 tokens, .* begins 'two and three'"):
        data.batches(1, tokens=3)


def test_what_is_not_there(small: Data) -> None:
    with pytest.raises(DataError, match=r"unknown split 'dev' \(known: train, valid, test\)"):
        small.split("dev")
    with pytest.raises(DataError, match="keeps no untokenised references"):
        _ = small.split("train").references
    assert small.split("test").alignments is None


def test_untokenised_text_without_moses_stays_as_it_is(demo: Data) -> None:
    assert demo.detokenize(["kula som ,"]) == ["kula som ,"]
    assert list(demo.split("test").references) == list(demo.split("test").target)


def test_text_that_did_not_come_tokenised_stays_as_it_is_where_its_corpus_often_does(tmp_path: Path) -> None:
    for name in ("train", "val", "test_2016_flickr"):
        for end, lines in (("de", GERMAN), ("en", ENGLISH)):
            (tmp_path / f"{name}.{end}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    raw = {"dataset": "multi30k-de-en", "tokenizer": "word", "pretokenize": "none"}
    data = Data.open(prepare(Recipe.model_validate(raw), cache=tmp_path / "cache", source=tmp_path))
    assert data.detokenize(["it is , yes ."]) == ["it is , yes ."]
    del data.manifest["tokenized"]  # an older version did not say it
    assert data.detokenize(["it is , yes ."]) == ["it is, yes."]


def test_what_was_opened_is_read_on_though_its_folder_is_prepared_again(tmp_path: Path) -> None:
    """As when another process prepares the same recipe from other files while this one trains."""

    def made(word: str) -> Data:
        for end in ("de", "en"):
            (tmp_path / f"a.{end}").write_text("".join(f"{word} {number} {end}\n" for number in range(20)))
        dataset = {"kind": "parallel", "languages": ["de", "en"], "hold_every": 5}
        raw = {"dataset": {**dataset, "train": {"source": "a.de", "target": "a.en"}}, "tokenizer": "word"}
        return Data.open(prepare(Recipe.model_validate(raw), cache=tmp_path / "cache", source=tmp_path))

    first = made("old")
    aligned = with_fertilities(first)
    second = made("new")
    assert first.path == second.path
    for data in (first, aligned):
        valid = data.split("valid")
        assert [valid.source[0], valid.target[0], valid.references[0]] == ["old 4 de", "old 4 en", "old 4 en"]
        batch = next(data.eval_batches("train", tokens=100))
        words = first.source_vocabulary.decode(batch.source[0, : int(batch.source_valid[0].sum()) - 1].tolist())
        assert words.startswith("old ")
    assert next(aligned.eval_batches("valid", tokens=100)).fertility is not None
    assert second.split("valid").source[0] == "new 4 de"


@pytest.mark.parametrize("other", [{"digest": "another"}, {"files": {"another": {}}}])
def test_a_folder_that_is_prepared_again_while_it_is_opened_is_opened_anew(small: Data, monkeypatch, other) -> None:
    manifests = iter([{**small.manifest, **other}, small.manifest, small.manifest, small.manifest])
    monkeypatch.setattr("attnbench.data.corpus.read_manifest", lambda path: next(manifests))
    assert Data.open(small.path).manifest == small.manifest
    assert next(manifests, None) is None


def test_known_alignments_come_along(demo: Data) -> None:
    test = demo.split("test")
    assert test.alignments is not None
    assert len(test.alignments) == len(test)


def test_open_needs_only_the_folder(demo_path: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    demo_path.rename(moved)
    try:
        assert len(Data.open(moved).split("train")) == 700
    finally:
        moved.rename(demo_path)
