from __future__ import annotations

import pytest
from pydantic import ValidationError

from attnbench.core.files import parse_yaml
from attnbench.core.registry import MemberError
from attnbench.core.spec import problems
from attnbench.data.datasets.base import SPLITS, datasets
from attnbench.data.recipe import Recipe

FILES = {"source": "a.de", "target": "a.en"}
DIGESTS = {
    "copy": "981b20d2c911",
    "demo": "85c992caac70",
    "documents": "521d07ce711d",
    "europarl-ro-en": "5a456152fbec",
    "iwslt14-de-en": "2a81b6ab991b",
    "iwslt15-en-vi": "b3e0b6f0d4f2",
    "iwslt17-fr-en": "0658ef8b8f01",
    "kftt": "536e2b33fd7f",
    "lm1b": "7656e5a6a210",
    "multi30k-de-en": "23dd12b36ead",
    "multi30k-en-de": "c5f9c42250e1",
    "multi30k-en-fr": "32310c42b37c",
    "multi30k-fr-en": "e2601961afc4",
    "nc-doc": "767675a7a08a",
    "parallel": "46cd9e9a12f9",
    "ted-doc": "61218e42fc66",
    "wmt14-en-de": "7f1111a9c0e7",
    "wmt16-en-ro": "b61f7e005154",
    "wmt17-cs": "e5ca3251b716",
    "wmt17-de": "b8bfd1c227eb",
    "wmt17-fi": "50813524d3f4",
    "wmt17-tr": "5076c7fa00f4",
}
OWN = {
    "parallel": {"kind": "parallel", "languages": ["de", "en"], "train": FILES},
    "documents": {"kind": "documents", "languages": ["de", "en"], "train": [FILES]},
}


def usual(kind: str) -> Recipe:
    return Recipe.model_validate({"dataset": OWN.get(kind, kind)})


def test_the_corpora_there_are() -> None:
    assert datasets.kinds() == sorted(DIGESTS)


def test_a_wrong_key_of_a_corpus_is_no_fault_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.get("iwslt14-de-en"), "recipe", {"lower_case": True})
    with pytest.raises(MemberError, match=r"^\w+: unknown key of its recipe 'lower_case'; did you mean 'lowercase'\?"):
        usual("iwslt14-de-en")


def test_keys_left_out_take_the_usual_value_of_the_corpus() -> None:
    recipe = usual("iwslt14-de-en")
    assert (recipe.lowercase, recipe.max_length, recipe.max_ratio) == (True, 175, 1.5)
    assert recipe.sizes() == (10_000, 10_000, True)
    assert recipe.pretokenize == "moses"
    assert usual("parallel").empty == "error"
    assert usual("demo").pretokenize == "none"


def test_keys_given_win() -> None:
    recipe = Recipe.model_validate({"dataset": "iwslt14-de-en", "lowercase": False, "max_length": None})
    assert (recipe.lowercase, recipe.max_length, recipe.max_ratio) == (False, None, 1.5)


@pytest.mark.parametrize("kind", datasets.kinds())
def test_a_dumped_recipe_says_all_and_reads_back(kind: str) -> None:
    recipe = usual(kind)
    dumped = recipe.dump()
    assert set(dumped) == set(Recipe.model_fields)
    again = Recipe.model_validate(dumped)
    assert again == recipe
    assert again.digest() == recipe.digest()


def test_digests_are_fixed() -> None:
    """Prepared folders are named by them: a change here makes everyone prepare again."""
    assert {kind: usual(kind).digest() for kind in datasets.kinds()} == DIGESTS


def test_any_change_that_matters_changes_the_digest() -> None:
    changes = [
        {},
        {"lowercase": False},
        {"tokenizer": {"kind": "bpe", "vocab": 9000}},
        {"tokenizer": {"kind": "bpe", "joint": False}},
        {"tokenizer": "word"},
        {"pretokenize": "none"},
        {"normalize": True},
        {"split_hyphens": True},
        {"max_length": 50},
        {"max_ratio": 2},
        {"empty": "error"},
        {"empty": "keep"},
    ]
    digests = {Recipe.model_validate({"dataset": "multi30k-de-en", **change}).digest() for change in changes}
    assert len(digests) == len(changes)


def test_the_longer_spec_and_its_recipe_name_one_folder() -> None:
    class Longer(Recipe):
        extra: int = 3

    longer = Longer.model_validate({"dataset": "multi30k-de-en", "extra": 4})
    assert longer.plain() == usual("multi30k-de-en")


@pytest.mark.parametrize(
    ("raw", "path", "message"),
    [
        ({"dataset": "multi30k-de-e"}, ("dataset", "kind"), "did you mean 'multi30k-de-en'"),
        ({}, ("dataset",), "required"),
        ({"dataset": "demo", "lowercas": True}, ("lowercas",), "did you mean 'lowercase'"),
        ({"dataset": {"kind": "demo", "pairs": 0}}, ("dataset", "pairs"), "greater than or equal to 1"),
        ({"dataset": "demo", "tokenizer": {"kind": "bpe", "vocab": 4}}, ("tokenizer", "vocab"), "equal to 5"),
        ({"dataset": {"kind": "parallel", "languages": ["de"], "train": FILES}}, ("dataset", "languages"), "2 items"),
        ({"dataset": {"kind": "iwslt17-fr-en", "valid": ["tst2016"]}}, ("dataset", "valid", 0), "'tst2015'"),
    ],
)
def test_faults_are_told_at_their_place(raw: dict, path: tuple, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(raw)
    found = problems(caught.value)
    assert [where for where, _ in found] == [path]
    assert message in found[0][1]


def test_a_recipe_from_yaml() -> None:
    text = "{dataset: {kind: iwslt17-fr-en, test: [tst2010]}, tokenizer: {kind: bpe, vocab: 12000}, max_ratio: 2}"
    recipe = Recipe.model_validate(parse_yaml(text)[0])
    assert recipe.sizes().source == 12_000
    assert recipe.dataset.dump()["test"] == ["tst2010"]


@pytest.mark.parametrize("kind", datasets.kinds())
def test_what_a_list_shows_is_plain_and_whole(kind: str) -> None:
    cls = datasets.get(kind)
    entry = cls.describe()
    assert entry["name"] == kind
    assert entry["title"]
    assert set(entry["pairs"]) <= set(SPLITS)
    if kind not in (*OWN, "demo", "copy"):
        assert entry["licence"]
        assert entry["by_hand"].startswith("http")
        assert all(url.startswith("https://") for url in entry["sources"])
        assert entry["sources"]


def test_a_tokenizer_without_a_kind_is_the_usual_one_but_for_what_is_given():
    demo = Recipe.model_validate({"dataset": "demo", "tokenizer": {"source_vocab": 50}})
    assert demo.tokenizer.dump() == {**Recipe.model_validate({"dataset": "demo"}).tokenizer.dump(), "source_vocab": 50}
    own = {"kind": "parallel", "languages": ["de", "en"], "train": {"source": "a.de", "target": "a.en"}}
    assert Recipe.model_validate({"dataset": own, "tokenizer": {"vocab": 300}}).tokenizer.canonical() == {
        "kind": "bpe",
        "vocab": 300,
    }


@pytest.mark.parametrize(("codes", "words"), [
    (["FR", "en"], "'FR' is no code of a language: two or three small letters, like 'fr'"),
    (["de", "en-US"], "like 'en'"),
    (["German", "en"], "'German' is no code"),
    (["", "en"], "'' is no code"),
    (["ger", "en"], "Moses has its rules of 'ger' under the code 'de'; write that"),
])  # fmt: skip
def test_what_is_no_code_of_a_language_is_refused(codes: list[str], words: str) -> None:
    """Moses would tokenise it by the rules of no language, without a word."""
    with pytest.raises(ValidationError, match=words):
        Recipe.model_validate(
            {"dataset": {"kind": "parallel", "languages": codes, "train": {"source": "a", "target": "b"}}}
        )


def test_text_that_moses_does_not_tokenise_may_call_its_languages_as_it_likes() -> None:
    dataset = {"kind": "parallel", "languages": ["ger", "eng"], "train": {"source": "a", "target": "b"}}
    assert Recipe.model_validate({"dataset": dataset, "pretokenize": "none"}).dataset.pair() == ("ger", "eng")


def test_a_tokenizer_of_the_usual_kind_has_the_usual_sizes() -> None:
    def made(raw: object) -> dict[str, object]:
        return Recipe.model_validate({"dataset": "wmt14-en-de", "tokenizer": raw}).tokenizer.dump()

    usual = made({})
    assert usual["vocab"] == 32768
    assert made("bpe") == made({"kind": "bpe"}) == usual
    assert made({"kind": "bpe", "joint": False}) == made({"joint": False}) == {**usual, "joint": False}
    assert made("word")["source_vocab"] == 8000
    joint = Recipe.model_validate({"dataset": "demo", "tokenizer": {"joint": True}}).tokenizer.dump()
    assert joint["source_vocab"] == joint["target_vocab"]  # though the demo's usual two are of two sizes
