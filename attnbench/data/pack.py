"""Sentences of a document joined into blocks: as many as fit, in their order, never across the document's end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from attnbench.data.blocks import join_sentences
from attnbench.data.special import SEPARATOR
from attnbench.data.store import TextLines, TextWriter
from attnbench.data.text import chunks
from attnbench.data.tokenizers.base import Vocabulary

log = logging.getLogger("attnbench")

_AT_ONCE = 2048
_SIDES = ("src.txt", "tgt.txt", "tgt.raw")


class _Sentence(NamedTuple):
    """texts: source, target, and the raw target where it is kept. sizes: tokens of either side."""

    document: str
    texts: tuple[str, ...]
    sizes: tuple[int, int]


def pack(folder: Path, split: str, vocabularies: tuple[Vocabulary, Vocabulary], limit: int) -> dict[str, int]:
    """Make blocks of the sentences of a split, in the files that `build` wrote.

    limit: tokens of a block, on either side, the separators and EOS counted; a longer sentence is a block of its own.
    Returns the manifest's `pairs` (blocks), `sentences` and `longer` (blocks over the limit).
    """
    names = [name for name in _SIDES if (folder / f"{split}.{name}").exists()]
    counts = {"pairs": 0, "sentences": 0, "longer": 0}
    with TemporaryDirectory(dir=folder) as temporary:
        work = Path(temporary)
        with ExitStack() as files:
            writers = [files.enter_context(TextWriter(work / f"{split}.{name}")) for name in (*names, "docs")]
            for block in _blocks(_sentences(folder, split, names, vocabularies), limit):
                for writer, texts in zip(writers[:-1], zip(*(each.texts for each in block), strict=True), strict=True):
                    writer.write(join_sentences(texts))
                writers[-1].write(block[0].document)
                counts["pairs"] += 1
                counts["sentences"] += len(block)
                counts["longer"] += _width(block) > limit
        for file in work.iterdir():
            file.replace(folder / file.name)
    if counts["longer"]:
        log.warning("%s: %s sentences alone have more than %s tokens", split, f"{counts['longer']:,}", limit)
    return counts


def _blocks(sentences: Iterator[_Sentence], limit: int) -> Iterator[list[_Sentence]]:
    block: list[_Sentence] = []
    widths = (0, 0)
    for sentence in sentences:
        longer = _joined(widths, sentence)
        if block and (sentence.document != block[0].document or max(longer) > limit):
            yield block
            block, longer = [], _joined((0, 0), sentence)
        block.append(sentence)
        widths = longer
    if block:
        yield block


def _joined(widths: tuple[int, int], sentence: _Sentence) -> tuple[int, int]:
    """Tokens of either side with one sentence more, and a separator or EOS behind it."""
    return widths[0] + sentence.sizes[0] + 1, widths[1] + sentence.sizes[1] + 1


def _width(block: list[_Sentence]) -> int:
    """Tokens of the longer side."""
    return max(reduce(_joined, block, (0, 0)))


def _sentences(
    folder: Path, split: str, names: list[str], vocabularies: tuple[Vocabulary, Vocabulary]
) -> Iterator[_Sentence]:
    texts = [TextLines(folder / f"{split}.{name}") for name in names]
    for rows in chunks(zip(TextLines(folder / f"{split}.docs"), *texts, strict=True), _AT_ONCE):
        plain = [(row[0], tuple(_without_separators(text) for text in row[1:])) for row in rows]
        sources, targets = (
            vocabulary.encode_batch([sides[place] for _, sides in plain])
            for place, vocabulary in enumerate(vocabularies)
        )
        for (document, sides), source, target in zip(plain, sources, targets, strict=True):
            yield _Sentence(document, sides, (len(source), len(target)))


def _without_separators(text: str) -> str:
    """A text that happens to hold the separator's word would have one sentence too many."""
    return text.replace(SEPARATOR, "sep") if SEPARATOR in text else text
