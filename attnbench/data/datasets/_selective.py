"""Documents in English and German as Maruf, Martins and Haffari (2019) released them: a line `<d>` opens each."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from attnbench.data.datasets.base import DatasetSpec, Languages, Remote
from attnbench.data.datasets.documents import document_part
from attnbench.data.documents import read_documents, write_aligned
from attnbench.data.finder import Finder
from attnbench.data.parts import Part

_URL = "https://raw.githubusercontent.com/sameenmaruf/selective-attn/master/data"
_SPLITS = {"train": "train", "valid": "dev", "test": "test"}


class Selective(DatasetSpec):
    """English to German, blocks of at most 512 tokens. A member says which folder of the release it is."""

    licence: ClassVar = "none stated with the files"
    documents: ClassVar = True
    recipe: ClassVar = MappingProxyType({"tokenizer": {"kind": "bpe", "vocab": 30000, "joint": True}, "block": 512})
    folder: ClassVar[str]

    def pair(self) -> Languages:
        return Languages("en", "de")

    def bundles(self) -> list[list[Remote]]:
        names = [_name(split, side) for split in _SPLITS.values() for side in self.pair()]
        return [[Remote(name, (f"{_URL}/{self.folder}/{name}",)) for name in names]]

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        paths = {
            split: files.pair(*([self._inside(_name(name, side)), _name(name, side)] for side in self.pair()))
            for split, name in _SPLITS.items()
        }
        if files.missing:
            return {}
        parts = {}
        for split, sides in paths.items():
            source, target = (read_documents(*each, "marked") for each in zip(sides, self.pair(), strict=True))
            parts[split] = [document_part(write_aligned(source, target, sides, work, split), sides)]
        return parts

    def _inside(self, name: str) -> str:
        return f"{self.folder}/{name}"  # where the whole release stands, both corpora have files of one name


def _name(split: str, side: str) -> str:
    return f"concatenated_en2de_{split}_{side}.txt"
