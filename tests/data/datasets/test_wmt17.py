from __future__ import annotations

import random

import pytest

from attnbench.core.errors import DataError
from attnbench.data.base import EOS
from attnbench.data.datasets.base import datasets
from attnbench.data.recipe import Recipe

KINDS = ("wmt17-cs", "wmt17-de", "wmt17-fi", "wmt17-tr")
HELD_OUT = {"cs": "newstest2015", "de": "newstest2015", "fi": "newstest2015", "tr": "newsdev2016"}
ENGLISH = "it &apos;s a well @-@ known story , {} says ."
FOREIGN = "das ist {} &quot; bekannt @-@ e &quot; Geschichte ."


def lines(text: str, start: int, count: int) -> str:
    return "".join(text.format(f"N{number}") + "\n" for number in range(start, start + count))


def archive(language: str, mark: str = "") -> dict[str, str]:
    """What dev.tgz of a pair holds, other years included; `mark` stands in every English line."""
    names = {HELD_OUT[language]: 100, "newstest2016": 200, "newstest2014": 300}
    members = {f"{name}.tc.en": lines(mark + ENGLISH, start, 4) for name, start in names.items()}
    return members | {f"{name}.tc.{language}": lines(FOREIGN, start, 4) for name, start in names.items()}


def give(given, language: str, folder: str = "", count: int = 30, mark: str = "") -> None:
    given.text(f"{folder}corpus.tc.en.gz", lines(mark + ENGLISH, 0, count))
    given.text(f"{folder}corpus.tc.{language}.gz", lines(FOREIGN, 0, count))
    given.pack(f"{folder}dev.tgz", archive(language, mark))


@pytest.mark.parametrize("kind", KINDS)
def test_the_released_text_is_taken_as_it_is(given, prepared, kind: str) -> None:
    language = kind[-2:]
    give(given, language)
    data = prepared(kind)
    assert data.languages == ("en", language)
    assert {name: len(data.split(name)) for name in ("train", "valid", "test")} == {"train": 30, "valid": 4, "test": 4}
    assert data.split("train").source[29] == ENGLISH.format("N29")
    assert data.split("train").target[29] == FOREIGN.format("N29")
    assert data.split("valid").source[0] == ENGLISH.format("N100")
    assert data.split("test").target[0] == FOREIGN.format("N200")
    assert data.split("test").references[0] == 'das ist N200 "bekannt-e" Geschichte.'
    assert {item["name"] for item in data.manifest["sources"]} == {
        *(f"corpus.tc.{side}.gz" for side in ("en", language)),
        *(f"{name}.tc.{side}" for name in (HELD_OUT[language], "newstest2016") for side in ("en", language)),
    }


def test_lines_that_come_later_are_tokenised_as_the_released_text_was(given, prepared) -> None:
    give(given, "de")
    data = prepared("wmt17-de")
    assert data.tokenize(["it’s a well-known story, N1 says."]) == [ENGLISH.format("N1")]
    assert data.detokenize([FOREIGN.format("N1")]) == ['das ist N1 "bekannt-e" Geschichte.']


def test_one_folder_may_hold_all_pairs_each_with_its_own_english(given, prepared) -> None:
    for language in HELD_OUT:
        give(given, language, folder=f"{language}-en/", mark=f"{language} ")
    for kind in KINDS:
        data = prepared(kind)
        for split in ("train", "valid", "test"):
            assert data.split(split).source[0].startswith(f"{kind[-2:]} it")


def test_raw_text_is_tokenised(given, prepared) -> None:
    for name in ("corpus", "newsdev2016", "newstest2016"):
        given.text(f"{name}.en", "It’s a well-known story.\n" * 5)
        given.text(f"{name}.tr", "“Bilinen” bir hikâye.\n" * 5)
    data = prepared("wmt17-tr")
    assert data.split("train").source[0] == "It &apos;s a well @-@ known story ."
    assert data.split("test").target[0] == "&quot; Bilinen &quot; bir hikâye ."
    assert data.split("test").references[0] == "“Bilinen” bir hikâye."


def test_raw_text_never_stands_in_for_a_part_of_the_released(given, prepared) -> None:
    give(given, "de")
    (given.folder / "dev.tgz").unlink()
    for name in ("newstest2015", "newstest2016"):
        for side in ("en", "de"):
            given.text(f"{name}.{side}", "Raw.\n")
    with pytest.raises(DataError) as caught:
        prepared("wmt17-de")
    wanted = str(caught.value)
    for name in ("newstest2015.tc.en", "newstest2015.tc.de", "newstest2016.tc.en", "newstest2016.tc.de"):
        assert f"{name} (plain, .gz or .xz)" in wanted
    assert "attnbench prepare wmt17-de --from DIR" in wanted


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_files_are(kind: str) -> None:
    language = kind[-2:]
    (bundle,) = datasets.parse(kind).bundles()
    root = f"https://data.statmt.org/wmt17/translation-task/preprocessed/{language}-en/"
    names = ("corpus.tc.en.gz", f"corpus.tc.{language}.gz", "dev.tgz")
    assert [(remote.name, remote.urls) for remote in bundle] == [(name, (root + name,)) for name in names]


def test_the_hub_is_asked_only_where_it_has_the_same_splits() -> None:
    """Its Czech lacks CzEng, its Finnish newstest2016 holds every sentence twice."""
    hubs = {kind: hub for kind in KINDS if (hub := datasets.parse(kind).hub()) is not None}
    assert list(hubs) == ["wmt17-de", "wmt17-tr"]
    assert dict(hubs["wmt17-tr"].files) == {
        "corpus": "hf://datasets/wmt/wmt17/tr-en/train-*.parquet",
        "newsdev2016": "hf://datasets/wmt/wmt16/tr-en/validation-*.parquet",
        "newstest2016": "hf://datasets/wmt/wmt16/tr-en/test-*.parquet",
    }
    assert "not true-cased" in hubs["wmt17-tr"].note


@pytest.mark.parametrize("kind", KINDS)
def test_the_usual_recipe_has_one_vocabulary_of_16k(kind: str) -> None:
    recipe = Recipe.model_validate({"dataset": kind})
    assert recipe.sizes() == (16_000, 16_000, True)
    assert (recipe.lowercase, recipe.max_length, recipe.max_ratio) == (False, None, None)


def test_from_the_released_layout_to_batches(given, prepared) -> None:
    """Sentences of many lengths through the whole pipeline: every pair comes, whole, and reads back."""
    rng = random.Random(17)
    words = [[f"{stem}{number}" for number in range(40)] for stem in ("w", "v")]
    texts = {
        side: ["".join(f"{rng.choice(pool)} " for _ in range(rng.randint(1, 60))) + "." for _ in range(200)]
        for side, pool in zip(("en", "fi"), words, strict=True)
    }
    give(given, "fi")
    for side, text in texts.items():
        given.text(f"corpus.tc.{side}.gz", "\n".join(text) + "\n")
    data = prepared("wmt17-fi")
    train, tokens = data.split("train"), 400
    seen: dict[int, tuple[str, str]] = {}
    for cursor, batch in data.batches(1, tokens=tokens):
        rows, width = batch.source.shape[0], max(batch.source.shape[1], batch.target_in.shape[1])
        assert rows * width <= tokens
        for row, index in enumerate(batch.index.tolist()):
            source = batch.source[row][batch.source_valid[row]].tolist()
            target = batch.target_out[row][batch.target_valid[row]].tolist()
            assert source[-1] == target[-1] == EOS
            assert index not in seen
            seen[index] = data.source_vocabulary.decode(source), data.target_vocabulary.decode(target)
        if cursor.epoch > 0:
            break
    assert seen == {index: (train.source[index], train.target[index]) for index in range(200)}
    assert list(train.source) == texts["en"]
    held_out = [index for batch in data.eval_batches("test", tokens=tokens) for index in batch.index.tolist()]
    assert sorted(held_out) == [0, 1, 2, 3]
