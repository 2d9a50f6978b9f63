"""Prepared data as tasks see it: splits, vocabularies, batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from attnbench.core.errors import DataError
from attnbench.core.spec import unknown
from attnbench.data.base import Batch, Cursor
from attnbench.data.batching import Ids, TrainStream, eval_batches
from attnbench.data.blocks import join_sentences, split_sentences
from attnbench.data.build import SIDES, line_cleaner
from attnbench.data.datasets.base import Languages
from attnbench.data.prepare import files_fault, read_manifest
from attnbench.data.recipe import Recipe
from attnbench.data.store import IdLists, TextLines
from attnbench.data.text import moses_detokenize
from attnbench.data.tokenizers.base import Vocabulary

_SHOWN = 60
"""Characters of a line that a message shows."""


class Split:
    """One split: lines by number, read from disk when asked for."""

    def __init__(self, folder: Path, name: str, numbers: dict[str, Any], rows: tuple[int, int]) -> None:
        self.name = name
        self._folder = folder
        self._numbers = numbers
        self._rows = rows

    def hold(self) -> None:
        """Open what training and validation read: they go on reading it should the folder be replaced meanwhile."""
        texts = () if self.name == "train" else ("source", "target", "references", "alignments", "documents")
        for name in ("ids", *texts):
            with suppress(DataError):  # a split without references is told when they are asked for
                getattr(self, name)

    def with_fertilities(self, folder: Path) -> Self:
        """The same split, whose ids have the fertilities that `folder` holds."""
        found = copy(self)
        found.ids = self.ids._replace(fertility=IdLists(folder / f"{self.name}.ids", 1))
        return found

    def __len__(self) -> int:
        return self._numbers["pairs"]

    @cached_property
    def source(self) -> TextLines:
        """Tokenised source lines."""
        return TextLines(self._folder / f"{self.name}.src.txt")

    @cached_property
    def target(self) -> TextLines:
        """Tokenised target lines."""
        return TextLines(self._folder / f"{self.name}.tgt.txt")

    @cached_property
    def references(self) -> TextLines:
        """Target lines as they were given, before tokenisation. The training split keeps none."""
        path = self._folder / f"{self.name}.tgt.raw"
        if not path.exists():
            raise DataError(
                f"{self._folder}: the {self.name} split keeps no untokenised references to score; valid and test do"
            )
        return TextLines(path)

    @cached_property
    def alignments(self) -> TextLines | None:
        """Word alignments, `i-j` from 0 (Pharaoh), where they are known."""
        path = self._folder / f"{self.name}.align"
        return TextLines(path) if path.exists() else None

    @cached_property
    def documents(self) -> TextLines | None:
        """The name of each line's document, where these are known."""
        path = self._folder / f"{self.name}.docs"
        return TextLines(path) if path.exists() else None

    @cached_property
    def ids(self) -> Ids:
        source, target = (
            IdLists(self._folder / f"{self.name}.{side}.ids", rows)
            for side, rows in zip(SIDES, self._rows, strict=True)
        )
        return Ids(source, target, self._numbers["wide_tokens"], self._numbers["widest"])


class Data:
    """A prepared folder. Make one with `Data.open`."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.recipe = Recipe.model_validate(manifest["recipe"])
        self.languages: Languages = self.recipe.dataset.pair()
        sizes = self.recipe.sizes()
        self._splits = {
            name: Split(path, name, numbers, (sizes.source, sizes.target))
            for name, numbers in manifest["splits"].items()
        }

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises DataError if `path` is no prepared folder, one of another version, or damaged."""
        while True:
            manifest = read_manifest(path)
            fault = files_fault(path, manifest["files"])
            data = cls(path, manifest)
            if fault is None:
                data._hold()
            if read_manifest(path) != manifest:  # it was prepared again meanwhile: half of it may be the old one
                continue
            if fault is not None:
                raise DataError(f"{fault}; delete {path} and run attnbench prepare again")
            return data

    def _hold(self) -> None:
        """Open all that training reads, so that it is of one preparation."""
        for split in self._splits.values():
            split.hold()
        _ = self.source_vocabulary, self.target_vocabulary

    def with_fertilities(self, folder: Path) -> Self:
        """The same data, whose batches have the fertilities that `folder` holds."""
        data = copy(self)
        data._splits = {name: split.with_fertilities(folder) for name, split in self._splits.items()}
        return data

    def split(self, name: str) -> Split:
        """train, valid or test. Raises DataError for another name."""
        if name not in self._splits:
            raise DataError(unknown("split", name, list(self._splits)))
        return self._splits[name]

    def _vocabulary(self, side: str) -> Vocabulary:
        entry = self.manifest["vocabulary"][side]
        return self.recipe.load(self.path / entry["file"], entry["rows"])

    @cached_property
    def source_vocabulary(self) -> Vocabulary:
        return self._vocabulary("source")

    @cached_property
    def target_vocabulary(self) -> Vocabulary:
        return self.source_vocabulary if self.recipe.sizes().joint else self._vocabulary("target")

    def tokenize(self, lines: Iterable[str], language: str | None = None) -> list[str]:
        """Raw lines as the recipe tokenises them; language: source if not given."""
        language = language or self.languages.source
        repair = self.recipe.dataset.repair(language) or str
        clean = line_cleaner(self.recipe, language)
        if self.recipe.block is None:
            return [clean(repair(line)) for line in lines]
        return [join_sentences([clean(repair(part)) for part in split_sentences(line)]) for line in lines]

    @property
    def detokenizes(self) -> bool:
        """Whether the corpus was tokenised by Moses, here or before it came."""
        came_so = self.manifest.get("tokenized", self.recipe.dataset.moses_words())  # older ones do not say it
        return self.recipe.pretokenize == "moses" or bool(came_so)

    def detokenize(self, lines: Iterable[str]) -> list[str]:
        """Tokenised target lines as people write them; as they are if the corpus was never tokenised by Moses."""
        if not self.detokenizes:
            return list(lines)
        if self.recipe.block is None:
            return moses_detokenize(self.languages.target, lines)
        return [join_sentences(moses_detokenize(self.languages.target, split_sentences(line))) for line in lines]

    def batches(
        self,
        seed: int,
        *,
        tokens: int,
        shard: tuple[int, int] = (0, 1),
        start: Cursor = Cursor(),  # noqa: B008
    ) -> Iterator[tuple[Cursor, Batch]]:
        """The endless training stream from `start` on: (where the next batch begins, batch); see TrainStream.

        Raises DataError if a pair does not fit into a batch.
        """
        ids = self.split("train").ids
        if ids.widest > tokens:
            raise self._too_wide(ids, tokens)
        return TrainStream(ids, seed, tokens=tokens, shard=shard).batches(start)

    def _too_wide(self, ids: Ids, tokens: int) -> DataError:
        number = int(np.maximum(np.diff(ids.source.offsets), np.diff(ids.target.offsets)).argmax())
        sides = ((self.source_vocabulary, ids.source[number]), (self.target_vocabulary, ids.target[number]))
        vocabulary, longer = max(sides, key=lambda side: len(side[1]))
        text = vocabulary.decode(longer.tolist())
        begins = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        return DataError(
            f"training pair {number + 1:,} of {len(ids.source):,} has {ids.widest:,} tokens, and a batch holds "
            f"{tokens:,}: raise train.batch_tokens, or remove that line from the text, or split it or a long word of "
            f"it; it begins {begins!r}"
        )

    def eval_batches(
        self, split: str, *, tokens: int, rows: int | None = None, lines: NDArray[np.int64] | None = None
    ) -> Iterator[Batch]:
        """Every pair of a split once, or those at `lines`, sorted by source length.

        rows * max(S, T) <= tokens in each batch; rows: a bound on its pairs, too.
        """
        return eval_batches(self.split(split).ids, tokens=tokens, rows=rows, lines=lines)
