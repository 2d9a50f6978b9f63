"""The interface of a corpus: where its files are, which of them make the splits, and its usual recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator

from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.parts import Part
from attnbench.data.text import Clean

SPLITS = ("train", "valid", "test")


class Languages(NamedTuple):
    """Codes of the two languages, as `LanguageCode` has them."""

    source: str
    target: str


class Remote(NamedTuple):
    """A file to fetch: the name it is kept under, its mirrors in the order they are tried, and `sha256:` or `md5:`."""

    name: str
    urls: tuple[str, ...]
    checksum: str | None = None
    size: int | None = None


class DatasetSpec(Spec):
    """One corpus. A member says what it is in class variables and finds its files in `sources`."""

    kind: str
    title: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    by_hand: ClassVar[str] = ""
    """Where a person finds the files."""
    documents: ClassVar[bool] = False
    """Whether it says where a document ends."""
    repeats: ClassVar[bool] = False
    """Whether its splits share lines by design, of which there is nothing to tell."""
    wrappers: ClassVar[tuple[str, ...]] = ()
    """Archives that hold the files too, should a person have them instead of the released ones."""
    recipe: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The fields of a Recipe that this corpus is usually prepared with; what is not named keeps its own default."""
    expected: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Pairs of each split after the usual recipe, as published."""

    def pair(self) -> Languages:
        raise unwritten(self, "pair")

    @classmethod
    def describe(cls) -> dict[str, Any]:
        """What lists show of it; plain data."""
        required = any(field.is_required() for field in cls.model_fields.values())
        spec = cls.model_construct()
        remotes = [] if required else [remote for bundle in spec.bundles() for remote in bundle]
        return {
            "name": spec.kind,
            "title": cls.title,
            "languages": None if required else list(spec.pair()),
            "pairs": dict(cls.expected),
            "bytes": sum(remote.size or 0 for remote in spec.bundles()[0]) if remotes else 0,
            "licence": cls.licence,
            "sources": [url for remote in remotes for url in remote.urls],
            "by_hand": cls.by_hand,
        }

    def usual(self) -> Mapping[str, Any]:
        """`recipe`, or what takes its place where the fields decide it."""
        return self.recipe

    def bundles(self) -> list[list[Remote]]:
        """The files to fetch, in each of the ways they are published, the best first; none: nothing can be fetched."""
        return []

    def hub(self) -> Hub | None:
        """A copy on the hub, should no mirror answer."""
        return None

    def repair(self, language: str) -> Clean | None:
        """What is done to a raw line of this language before all else, references included."""
        return None

    def longest_words(self) -> int | None:
        """Words of the longest sentence of any split, where that is known without the data."""
        return None

    def moses_words(self) -> bool:
        """Text that comes tokenised is so in the manner of Moses: Moses can undo it."""
        return True

    def local_files(self, folder: Path | None) -> list[Path]:
        """The user's own files that it is made from: prepared again when they have changed.

        folder: where the user says that files are.
        """
        return []

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        """The files of each split: `train`, and of `valid` and `test` those that are not held out from it.

        work: a folder for what has to be written first; it is removed afterwards.

        What is missing is noted by `files`; the caller tells of it. Raises DataError for fields that cannot be met.
        """
        raise unwritten(self, "sources")


def _language_code(code: str) -> str:
    """Moses has its rules under such codes, and takes any other for a language without rules."""
    if not re.fullmatch(r"[a-z]{2,3}", code):
        near = re.match(r"[A-Za-z]{2,3}(?![A-Za-z])", code)
        hint = f", like '{near[0].lower()}'" if near else ", like 'en'"
        raise ValueError(f"'{code}' is no code of a language: two or three small letters{hint}")
    return code


MOSES_CODES = {
    longer: code
    for code, both in {
        "ca": "cat", "cs": "ces cze", "de": "deu ger", "el": "ell gre", "en": "eng", "es": "spa", "et": "est",
        "fi": "fin", "fr": "fra fre", "ga": "gle", "hu": "hun", "is": "isl ice", "it": "ita", "lt": "lit", "lv": "lav",
        "nl": "nld dut", "pl": "pol", "pt": "por", "ro": "ron rum", "ru": "rus", "sk": "slk slo", "sl": "slv",
        "sv": "swe", "ta": "tam", "zh": "zho chi",
    }.items()
    for longer in both.split()
}  # fmt: skip
"""ISO 639-2 codes of the languages that Moses has rules for, and the codes that it has them under."""

LanguageCode = Annotated[str, AfterValidator(_language_code)]

datasets: Registry[DatasetSpec] = Registry("dataset", DatasetSpec, "attnbench.data.datasets")
DatasetField = Annotated[DatasetSpec, Family(lambda: datasets)]
