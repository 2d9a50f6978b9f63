"""Translations of documents: which sentence of an output is which, and what belongs to one document."""

from __future__ import annotations

from collections.abc import Sequence


def matched(sentences: Sequence[str], count: int) -> list[str]:
    """The sentences of an output as `count` of them: too few are filled up with empty ones, what is too much goes to
    the last. Raises ValueError for a count below 1."""
    if count < 1:
        raise ValueError(f"a block has at least one sentence, not {count}")
    kept = [*sentences[: count - 1], " ".join(sentences[count - 1 :])]
    return kept + [""] * (count - len(kept))


def joined(sentences: Sequence[str], documents: Sequence[str]) -> list[str]:
    """One line for each document, its sentences joined by spaces; sentences of one document stand together.

    documents: the name of each sentence's, or each block's, document. Source: Liu et al. 2020, section 4.1 (d-BLEU).
    """
    lines: list[list[str]] = []
    last: str | None = None
    for sentence, document in zip(sentences, documents, strict=True):
        if document != last:
            lines.append([])
            last = document
        if sentence:
            lines[-1].append(sentence)
    return [" ".join(line) for line in lines]
