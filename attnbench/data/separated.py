"""A vocabulary with one row more, for what stands between the sentences of a block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnbench.data.blocks import join_sentences, split_sentences
from attnbench.data.special import SEPARATOR
from attnbench.data.tokenizers.base import Vocabulary


class Separated:
    """The rows of another vocabulary, and behind them the separator's."""

    def __init__(self, inner: Vocabulary) -> None:
        self._inner = inner
        self.separator = inner.rows
        self.rows, self.filled = inner.rows + 1, inner.filled + 1

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        sentences = [split_sentences(text) for text in texts]
        encoded = iter(self._inner.encode_batch([sentence for block in sentences for sentence in block]))
        found: list[list[int]] = []
        for block in sentences:
            ids = next(encoded)
            for _ in block[1:]:
                ids = [*ids, self.separator, *next(encoded)]
            found.append(ids)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        sentences: list[list[int]] = [[]]
        for index in ids:
            if index == self.separator:
                sentences.append([])
            else:
                sentences[-1].append(index)
        return join_sentences([self._inner.decode(sentence) for sentence in sentences])

    def token(self, index: int) -> str:
        return SEPARATOR if index == self.separator else self._inner.token(index)

    def save(self, path: Path) -> None:
        self._inner.save(path)
