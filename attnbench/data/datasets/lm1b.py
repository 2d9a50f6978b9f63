"""Sentences of the One Billion Word benchmark (Chelba et al. 2013), to be copied (Lioutas and Drozdyuk 2019)."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from attnbench.core.errors import DataError
from attnbench.data.datasets.base import DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.lines import Line, read_lines
from attnbench.data.parts import Part, Select
from attnbench.data.text import spaced

RELEASED = "news.en-00001-of-00100"
"""The first shard of the training text: some 300,000 sentences in shuffled order."""
SAMPLE = ("1b_benchmark.dev.tokens", "1b_benchmark.test.tokens")
"""Four held-out shards as a course gave them out; together they have enough sentences."""
_ARCHIVE = "1-billion-word-language-modeling-benchmark-r13output.tar.gz"


@datasets.register
class Lm1b(DatasetSpec):
    """News sentences, source and target the same: those of at most 30 words whose hash with the seed is smallest.

    Test has the smallest hashes, then valid, then train; equal sentences (case aside) count once, so no two splits
    share one. The paper has two sets, 10,000 and 1,000 sentences; our valid is its second, and our test is a third one
    that no training has looked at. Which sentences the authors took is not known.

    Lower-cased words, and 22,110 rows: that is the vocabulary with which the paper's models have the sizes it prints,
    and 10,000 lower-cased sentences have about 22,000 words (with case about 24,300). A perfect copy then scores 84 to
    85 BLEU, for words that the training sentences lack cannot be copied; the paper's best is 83.92.
    """

    kind: Literal["lm1b"] = "lm1b"
    title: ClassVar = "One Billion Word, sentences to be copied"
    licence: ClassVar = "free for research (WMT 2011 news crawl)"
    by_hand: ClassVar = "https://www.statmt.org/lm-benchmark/"
    recipe: ClassVar = MappingProxyType(
        {
            "tokenizer": {"kind": "word", "source_vocab": 22110, "target_vocab": 22110, "joint": True},
            "pretokenize": "none",
            "lowercase": True,
        }
    )
    pairs: int = Field(default=10_000, ge=1)
    """Sentences to train on."""
    held_out: int = Field(default=1000, ge=1)
    """Sentences of each of valid and test."""
    longest: int = Field(default=30, ge=1)
    """Words of the longest sentence."""
    seed: int = 1
    """Chooses the sentences."""

    def pair(self) -> Languages:
        return Languages("en", "en")

    def bundles(self) -> list[list[Remote]]:
        url = f"https://www.statmt.org/lm-benchmark/{_ARCHIVE}"
        checksum = "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"
        return [[Remote(_ARCHIVE, (url,), checksum, 1_792_209_805)]]

    def longest_words(self) -> int:
        return self.longest

    def moses_words(self) -> bool:
        return False

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        sample = [path for path in map(files.find, SAMPLE) if path is not None]
        paths = sample if files.find(RELEASED) is None and len(sample) == len(SAMPLE) else [files.one(RELEASED)]
        if files.missing:
            return {}
        sizes = {"test": self.held_out, "valid": self.held_out, "train": self.pairs}
        chosen = heapq.nsmallest(sum(sizes.values()), self._candidates(paths))
        if len(chosen) < sum(sizes.values()):
            names = ", ".join(path.name for path in paths)
            raise DataError(
                f"{self.kind}: {sum(sizes.values()):,} sentences are wanted and {names} has {len(chosen):,} different "
                f"ones of at most {self.longest} words; lower dataset.pairs or dataset.held_out, raise dataset.longest"
            )
        parts: dict[str, list[Part]] = {}
        first = 0
        for split, size in sizes.items():
            places = [place[1:] for place in chosen[first : first + size]]
            own = [frozenset(line for number, line in places if number == index) for index in range(len(paths))]
            parts[split] = [Part(path, path, _only(lines)) for path, lines in zip(paths, own, strict=True) if lines]
            first += size
        return parts

    def _candidates(self, paths: list[Path]) -> Iterator[tuple[bytes, int, int]]:
        """(hash, file, line) of each different sentence that is short enough."""
        seen: set[bytes] = set()
        for number, path in enumerate(paths):
            for line in read_lines(path):
                text = spaced(line.text).lower()
                if not text or text.count(" ") >= self.longest:
                    continue
                key = hashlib.sha256(f"{self.seed} {text}".encode()).digest()[:16]
                if key not in seen:
                    seen.add(key)
                    yield key, number, line.number


def _only(numbers: frozenset[int]) -> Select:
    def select(lines: Iterable[Line]) -> Iterable[Line]:
        return (line for line in lines if line.number in numbers)

    return select
