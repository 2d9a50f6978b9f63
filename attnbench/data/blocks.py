"""A block as a line of text: its sentences, with separators between them."""

from __future__ import annotations

from collections.abc import Sequence

from attnbench.data.special import SEPARATOR


def split_sentences(block: str) -> list[str]:
    """The sentences of a line; one without a separator is one sentence."""
    sentences: list[list[str]] = [[]]
    for word in block.split():
        if word == SEPARATOR:
            sentences.append([])
        else:
            sentences[-1].append(word)
    return [" ".join(sentence) for sentence in sentences]


def join_sentences(sentences: Sequence[str]) -> str:
    """One line; a sentence may be empty."""
    return f" {SEPARATOR} ".join(sentences).strip()
