"""Any two line-aligned text files: plain, gzip or xz."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from attnbench.core.spec import Spec
from attnbench.data.datasets._own_files import existing, present_or_first
from attnbench.data.datasets.base import DatasetSpec, LanguageCode, Languages, datasets
from attnbench.data.finder import Finder
from attnbench.data.parts import Part


class Files(Spec):
    """Two files, line n of one being the translation of line n of the other."""

    source: str
    """Path of the source side."""
    target: str
    """Path of the target side."""
    alignment: str | None = None
    """Path of word alignments (`i-j` from 0), a line for each pair."""


@datasets.register
class ParallelSpec(DatasetSpec):
    """Your own text: line-aligned files, plain, .gz or .xz; paths are relative to the working directory."""

    kind: Literal["parallel"] = "parallel"
    title: ClassVar = "any two line-aligned files"
    recipe: ClassVar = MappingProxyType({"empty": "error"})
    languages: list[LanguageCode] = Field(min_length=2, max_length=2)
    """Codes of the source and the target language, like [de, en]; Moses tokenises by them."""
    train: Files
    """Training text."""
    more: list[Files] = Field(default_factory=list)
    """More training text, after it."""
    valid: Files | None = None
    """Validation text; left out: taken from the training text."""
    test: Files | None = None
    """Test text; left out: taken from the training text."""
    hold_every: int = Field(default=100, ge=3)
    """Of every so many training pairs, one is held out for each of valid and test that is left out."""
    tokenized: bool = False
    """The text is tokenised as Moses does: it is not tokenised again, and Moses can undo it."""

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        if len({files.alignment is None for files in (self.train, *self.more)}) > 1:
            raise ValueError("some of the training text has alignments and some has none; give all of them, or none")
        return self

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.valid and self.test and self.is_set("hold_every"):
            yield "hold_every", "valid and test have files of their own, so that nothing is held out"
        for name in ("train", "valid", "test"):
            if (files := getattr(self, name)) is not None and files.alignment is not None:
                yield f"{name}.alignment", "it is kept beside the data; scores and fertilities learn their own"

    def pair(self) -> Languages:
        return Languages(*self.languages)

    def moses_words(self) -> bool:
        return self.tokenized

    def local_files(self, folder: Path | None) -> list[Path]:
        given = [files for files in (self.train, *self.more, self.valid, self.test) if files is not None]
        names = [name for files in given for name in (files.source, files.target, files.alignment) if name is not None]
        return [present_or_first(name, [] if folder is None else [folder]) for name in names]

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        absent = {"valid": self.valid is None, "test": self.test is None}
        held = {self.hold_every - place: split for place, split in enumerate(absent) if absent[split]}
        train = (self._part(each, files) for each in (self.train, *self.more))
        parts = {"train": [part._replace(every=self.hold_every, held=held) for part in train]}
        for split, given in (("valid", self.valid), ("test", self.test)):
            if given is not None:
                parts[split] = [self._part(given, files)]
        return parts

    def _part(self, given: Files, files: Finder) -> Part:
        alignment = None if given.alignment is None else existing(given.alignment, files)
        return Part(
            existing(given.source, files),
            existing(given.target, files),
            tokenized=self.tokenized,
            alignment=alignment,
        )
