from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from attnbench.data.special import UNK
from attnbench.data.tokenizers.base import VocabularySizes, tokenizers
from attnbench.data.tokenizers.word import WordSpec

TEXT = ["the cat sees the dog", "the dog sleeps", "a cat <s> </s>"]


def test_the_most_frequent_words_then_by_name() -> None:
    words = WordSpec(source_vocab=9).learn(lambda: TEXT, 9)
    assert [words.token(i) for i in range(9)] == ["<pad>", "<s>", "</s>", "<unk>", "the", "cat", "dog", "a", "sees"]
    assert words.encode("the dog sleeps") == [4, 6, UNK]
    assert words.decode([1, 4, 6, UNK, 2, 0, 0]) == "the dog <unk>"


def test_specials_in_the_text_are_unknown_words() -> None:
    words = WordSpec().learn(lambda: TEXT, 100)
    assert words.encode("<s> </s> <pad> <unk>") == [UNK] * 4


def test_rows_are_exact_and_unused_ones_decode_as_unknown() -> None:
    words = WordSpec().learn(lambda: TEXT, 100)
    assert (words.rows, words.filled) == (100, 10)
    assert words.decode([99]) == "<unk>"


def test_saved_and_loaded(tmp_path: Path) -> None:
    words = WordSpec().learn(lambda: TEXT, 8)
    words.save(tmp_path / "words.json")
    again = WordSpec().load(tmp_path / "words.json", 8)
    assert again.encode_batch(TEXT) == words.encode_batch(TEXT)
    assert (again.rows, again.filled) == (8, 8)


def test_sizes() -> None:
    assert WordSpec(source_vocab=10, target_vocab=20).sizes() == VocabularySizes(10, 20, False)
    assert tokenizers.parse({"kind": "word", "joint": True}).sizes().joint
    with pytest.raises(ValidationError, match="make source_vocab and target_vocab equal"):
        WordSpec(source_vocab=10, target_vocab=20, joint=True)
