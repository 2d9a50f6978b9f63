"""Any documents in two languages, aligned sentence by sentence: TED and NIST XML, marked lines, chats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from attnbench.core.spec import Spec
from attnbench.data.datasets._own_files import existing, present_or_first
from attnbench.data.datasets.base import SPLITS, DatasetSpec, LanguageCode, Languages, datasets
from attnbench.data.documents import Form, Written, read_documents, write_aligned
from attnbench.data.finder import Finder
from attnbench.data.parts import Part


class DocumentFiles(Spec):
    """Two files with the same documents, sentence n of one being the translation of sentence n of the other."""

    source: str
    """Path of the source side."""
    target: str
    """Path of the target side; of a file of chats the same one."""
    form: Form = "auto"
    """How documents are marked; auto: told by how the file begins."""
    names: str | None = None
    """Path of a file with the name of each line's document (what stands before a tab)."""


@datasets.register
class DocumentsSpec(DatasetSpec):
    """Your own documents; paths are relative to the working directory, or to the folder of `--from`."""

    kind: Literal["documents"] = "documents"
    title: ClassVar = "any documents in two languages"
    documents: ClassVar = True
    recipe: ClassVar = MappingProxyType({"block": 512})
    languages: list[LanguageCode] = Field(min_length=2, max_length=2)
    """Codes of the source and the target language, like [de, en]; Moses tokenises by them."""
    train: list[DocumentFiles] = Field(min_length=1)
    """Training text."""
    valid: list[DocumentFiles] = Field(default_factory=list)
    """Validation text; left out: documents of the training text."""
    test: list[DocumentFiles] = Field(default_factory=list)
    """Test text; left out: documents of the training text."""
    hold_every: int = Field(default=20, ge=3)
    """Of every so many training documents, one is held out for each of valid and test that is left out."""
    tokenized: bool = False
    """The text is tokenised as Moses does: it is not tokenised again, and Moses can undo it."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        for files in (*self.train, *self.valid, *self.test):
            if files.form == "names" and files.names is None:
                raise ValueError(f"{files.source}: the form `names` needs the file of names; give `names`")
            if files.names is not None and files.form not in ("auto", "names"):
                raise ValueError(f"{files.source}: the form `{files.form}` has no use for `names`; drop one of them")
            if (files.source == files.target or files.form == "chat") and self.languages.count("en") != 1:
                raise ValueError(f"{files.source}: one of the two languages of a chat is English; give `en` as one")
        return self

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.valid and self.test and self.is_set("hold_every"):
            yield "hold_every", "valid and test have files of their own, so that nothing is held out"

    def pair(self) -> Languages:
        return Languages(*self.languages)

    def moses_words(self) -> bool:
        return self.tokenized

    def local_files(self, folder: Path | None) -> list[Path]:
        given = [files for split in SPLITS for files in getattr(self, split)]
        names = dict.fromkeys(
            name for files in given for name in (files.source, files.target, files.names) if name is not None
        )
        return [present_or_first(name, [] if folder is None else [folder]) for name in names]

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        absent = [split for split in ("valid", "test") if not getattr(self, split)]
        held = {self.hold_every - place: split for place, split in enumerate(absent)}
        parts: dict[str, list[Part]] = {}
        for split in SPLITS:
            for place, given in enumerate(getattr(self, split)):
                part = self._part(given, files, work, f"{split}-{place}")
                if split == "train":
                    part = part._replace(every=self.hold_every, held=held)
                parts.setdefault(split, []).append(part)
        return parts

    def _part(self, given: DocumentFiles, files: Finder, work: Path, stem: str) -> Part:
        paths = existing(given.source, files), existing(given.target, files)
        names = None if given.names is None else existing(given.names, files)
        source, target = (
            read_documents(path, language, given.form, names) for path, language in zip(paths, self.pair(), strict=True)
        )
        written = write_aligned(source, target, paths, work, stem)
        return document_part(written, paths if names is None else (*paths, names), tokenized=self.tokenized)


def document_part(written: Written, read: Iterable[Path], *, tokenized: bool = False) -> Part:
    """The part of a split that documents make, once they are written out."""
    return Part(
        written.source,
        written.target,
        tokenized=tokenized,
        documents=written.names,
        made_from=tuple(dict.fromkeys(read)),
    )
