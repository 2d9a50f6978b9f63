"""Whole words, the most frequent ones of each side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from attnbench.core.files import write_atomic
from attnbench.data.special import EOS, SPECIALS, UNK
from attnbench.data.tokenizers.base import LEAST_ROWS, TokenizerSpec, Vocabulary, VocabularySizes, tokenizers


class WordVocabulary:
    """The i-th word has id 4 + i. A word of the text that is spelt like a special token is unknown."""

    def __init__(self, words: Sequence[str], rows: int) -> None:
        self.rows = rows
        self.filled = len(SPECIALS) + len(words)
        self._tokens = [*SPECIALS, *words]
        self._ids = {word: number for number, word in enumerate(self._tokens) if number >= len(SPECIALS)}

    def encode(self, text: str) -> list[int]:
        known = self._ids
        return [known.get(word, UNK) for word in text.split()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.token(index) for index in ids if index > EOS)

    def token(self, index: int) -> str:
        return self._tokens[index] if index < self.filled else SPECIALS[UNK]

    def save(self, path: Path) -> None:
        write_atomic(path, json.dumps(self._tokens[len(SPECIALS) :], ensure_ascii=False, indent=0) + "\n")


@tokenizers.register
class WordSpec(TokenizerSpec):
    """Whole words; the rarest become <unk>."""

    kind: Literal["word"] = "word"
    source_vocab: int = Field(default=8000, ge=LEAST_ROWS)
    """Rows of the source embedding, the 4 special tokens included."""
    target_vocab: int = Field(default=8000, ge=LEAST_ROWS)
    """Rows of the target embedding, the 4 special tokens included."""
    joint: bool = False
    """One vocabulary for both sides; both sizes must then be the same."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.joint and self.source_vocab != self.target_vocab:
            raise ValueError("a joint vocabulary has one size: make source_vocab and target_vocab equal")
        return self

    def sizes(self) -> VocabularySizes:
        return VocabularySizes(self.source_vocab, self.target_vocab, self.joint)

    def learn(self, texts: Callable[[], Iterable[str]], rows: int) -> Vocabulary:
        counts: Counter[str] = Counter()
        for text in texts():
            counts.update(text.split())
        for special in SPECIALS:
            counts.pop(special, None)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return WordVocabulary([word for word, _ in ranked[: rows - len(SPECIALS)]], rows)

    def load(self, path: Path, rows: int) -> Vocabulary:
        return WordVocabulary(json.loads(path.read_text(encoding="utf-8")), rows)
