from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from attnbench.core.errors import DataError
from attnbench.data.corpus import Data

TRAIN = "training-monolingual.tokenized.shuffled/news.en-00001-of-00100"
SMALL = {"kind": "lm1b", "pairs": 12, "held_out": 3, "longest": 4}


def sentences(count: int, first: int = 0) -> list[str]:
    """Distinct sentences; every fifth has five words, one too many."""
    return [
        " ".join(["Word", str(number), ",", "'s", *(["more"] if number % 5 == 0 else [])])
        for number in range(first, first + count)
    ]


def text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def split_lines(data: Data) -> dict[str, list[str]]:
    return {name: list(data.split(name).source) for name in ("train", "valid", "test")}


@pytest.fixture
def small(given: Any, prepared: Callable[..., Data]) -> Callable[..., Data]:
    def make(**fields: Any) -> Data:
        tokenizer = {"kind": "word", "source_vocab": 60, "target_vocab": 60, "joint": True}
        return prepared({**SMALL, **fields}, tokenizer=tokenizer)

    return make


def test_the_sentences_with_the_smallest_hashes(given: Any, small: Callable[..., Data]):
    lines = sentences(40)
    given.text(TRAIN, text(lines))
    data = small()
    short = [line.lower() for line in lines if len(line.split()) <= 4]
    ranked = sorted(short, key=lambda line: hashlib.sha256(f"1 {line}".encode()).digest())
    wanted = {"test": ranked[:3], "valid": ranked[3:6], "train": ranked[6:18]}
    found = split_lines(data)
    assert {name: set(own) for name, own in found.items()} == {name: set(own) for name, own in wanted.items()}
    assert {name: len(own) for name, own in found.items()} == {"train": 12, "valid": 3, "test": 3}
    assert all(list(data.split(name).target) == own for name, own in found.items())
    assert data.manifest["sources"][0]["name"] == "news.en-00001-of-00100"


def test_another_seed_chooses_others(given: Any, small: Callable[..., Data]):
    given.text(TRAIN, text(sentences(60)))
    assert set(split_lines(small())["train"]) != set(split_lines(small(seed=2))["train"])


def test_the_sample_is_one_pool_of_both_files_and_a_sentence_counts_once(given: Any, small: Callable[..., Data]):
    lines = [line for line in sentences(25) if "more" not in line]
    given.text("1b_benchmark.dev.tokens.gz", text(lines[:12]))
    given.text("1b_benchmark.test.tokens.gz", text([line.upper() for line in lines[:12]] + lines[12:]))
    found = split_lines(small(pairs=14))
    assert sum(map(len, found.values())) == 20
    assert len({line for own in found.values() for line in own}) == 20


def test_the_release_goes_before_the_sample(given: Any, small: Callable[..., Data]):
    given.text(TRAIN, text(sentences(40)))
    for name in ("dev", "test"):
        given.text(f"1b_benchmark.{name}.tokens", "not this\n" * 40)
    assert not any("not this" in own for own in split_lines(small()).values())


def test_the_released_archive(given: Any, small: Callable[..., Data]):
    name = "1-billion-word-language-modeling-benchmark-r13output"
    given.pack(f"{name}.tar.gz", {f"{name}/{TRAIN}": text(sentences(40))})
    assert len(split_lines(small())["train"]) == 12


def test_too_few_sentences_tell_how_many(given: Any, small: Callable[..., Data]):
    given.text(TRAIN, text(sentences(20)))
    with pytest.raises(DataError, match=r"18 sentences are wanted and news.en-00001-of-00100 has 16 .*lower dataset\."):
        small()


def test_missing_files_are_named_with_the_mend(given: Any, small: Callable[..., Data]):
    given.text("1b_benchmark.dev.tokens", "half of the sample\n")
    with pytest.raises(DataError, match=r"(?s)news\.en-00001-of-00100.*r13output\.tar\.gz.*prepare lm1b --from DIR"):
        small()


def test_the_usual_recipe(given: Any, prepared: Callable[..., Data]):
    from attnbench.data.recipe import Recipe

    recipe = Recipe.model_validate({"dataset": "lm1b"})
    assert recipe.sizes() == (22110, 22110, True)
    assert (recipe.lowercase, recipe.pretokenize, recipe.dataset.dump()["longest"]) == (True, "none", 30)
