from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from attnbench.data.base import BOS, EOS
from attnbench.data.corpus import Data
from attnbench.data.datasets.copy import CopySpec, sequences
from attnbench.data.prepare import prepare
from attnbench.data.recipe import Recipe


def drawn(**fields: object) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for split, text in sequences(CopySpec.model_validate(fields)):
        found[split].append(text)
    return found


def test_lengths_and_symbols_are_uniform():
    found = drawn(pairs=20_000, held_out=100, longest=4, symbols=5)
    assert {split: len(texts) for split, texts in found.items()} == {"train": 20_000, "valid": 100, "test": 100}
    lengths = Counter(len(text.split()) for text in found["train"])
    assert set(lengths) == set(range(5))
    assert all(abs(count - 4000) < 300 for count in lengths.values())  # five standard deviations
    words = Counter(word for text in found["train"] for word in text.split())
    assert set(words) == {"0", "1", "2", "3", "4"}
    assert max(words.values()) / min(words.values()) < 1.1


def test_long_sequences_stand_in_one_split_and_short_ones_are_drawn_freely():
    found = drawn(pairs=5000, held_out=300, longest=6)
    spec = CopySpec(pairs=5000, held_out=300, longest=6)
    assert [spec.apart(length) for length in range(7)] == [False, False, True, True, True, True, True]
    long = [[text for text in found[split] if spec.apart(len(text.split()))] for split in ("test", "valid", "train")]
    held_out = long[0] + long[1]
    assert len(set(held_out)) == len(held_out) > 300
    assert not set(held_out) & set(long[2])
    assert {text for text in found["valid"] if len(text.split()) < 2} <= set(found["train"])


def test_the_docstrings_numbers():
    spec = CopySpec()
    assert [spec.apart(length) for length in range(4)] == [False, False, False, True]


def test_sequences_just_enough_are_kept_apart():
    assert CopySpec(symbols=10, held_out=20).apart(2)  # the least, 100
    assert CopySpec(symbols=12, held_out=18, shortest=2, longest=2).apart(2)  # 4 times 36 held out
    assert not CopySpec(symbols=12, held_out=19, shortest=2, longest=2).apart(2)


@pytest.mark.parametrize("fields", [
    {"symbols": 1, "longest": 3}, {"held_out": 1, "longest": 200}, {"symbols": 2, "longest": 12, "held_out": 50},
])  # fmt: skip
def test_few_sequences_do_not_make_it_endless(fields: dict[str, int]):
    assert len(drawn(pairs=500, **fields)["train"]) == 500


def test_the_seed_draws_and_the_number_of_pairs_changes_none():
    found = drawn(pairs=300, held_out=20)
    fewer = drawn(pairs=100, held_out=20)
    assert fewer["train"] == found["train"][:100]
    assert fewer["valid"] == found["valid"]
    assert drawn(pairs=100, held_out=20, seed=2)["train"] != fewer["train"]
    assert drawn(pairs=2, held_out=2, seed=1)["test"] == ["3 3 14 1 13 19", "6 8 7 7"]


def test_a_shortest_length():
    assert min(len(text.split()) for text in drawn(pairs=300, held_out=5, shortest=3, longest=5)["train"]) == 3
    with pytest.raises(ValidationError, match="shortest 6 is more than longest 5"):
        CopySpec(shortest=6, longest=5)


def test_the_vocabulary_follows_the_symbols():
    for symbols in (20, 7):
        recipe = Recipe.model_validate({"dataset": {"kind": "copy", "symbols": symbols}})
        assert recipe.sizes() == (symbols + 4, symbols + 4, True)
        assert (recipe.pretokenize, recipe.empty, recipe.tokenizer.kind) == ("none", "keep", "word")


def test_empty_sequences_are_prepared_batched_and_kept(tmp_path: Path):
    recipe = Recipe.model_validate({"dataset": {"kind": "copy", "pairs": 400, "held_out": 60, "longest": 3}})
    data = Data.open(prepare(recipe, cache=tmp_path))
    for name, size in (("train", 400), ("valid", 60), ("test", 60)):
        split = data.split(name)
        assert len(split) == size == data.manifest["splits"][name]["read"]
        assert list(split.source) == list(split.target)
        assert "" in list(split.source)
        assert data.manifest["splits"][name]["source_unk"] == 0
    assert list(data.split("test").references) == list(data.split("test").target)
    empty = 0
    for batch in data.eval_batches("valid", tokens=40):
        for row in range(len(batch.index)):
            line = data.split("valid").source[int(batch.index[row])]
            assert data.source_vocabulary.decode(batch.source[row].tolist()) == line
            if not line:
                empty += 1
                assert batch.source[row, 0] == batch.target_out[row, 0] == EOS
                assert batch.target_in[row, 0] == BOS
                assert batch.source_valid[row].sum() == batch.target_valid[row].sum() == 1
    assert empty == list(data.split("valid").source).count("") > 0
    _, batch = next(data.batches(1, tokens=64))
    assert torch.equal(batch.source, batch.target_out)
