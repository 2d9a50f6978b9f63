"""KFTT: Wikipedia articles on Kyoto, Japanese-English (Neubig 2011)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from attnbench.data.datasets.base import DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.parts import Part


@datasets.register
class Kftt(DatasetSpec):
    """Japanese to English; the tokenised files of the release: `dev` for validation, `test` for test."""

    kind: Literal["kftt"] = "kftt"
    title: ClassVar = "KFTT Ja-En, Wikipedia on Kyoto"
    licence: ClassVar = "CC BY-SA 3.0"
    by_hand: ClassVar = "https://www.phontron.com/kftt"
    recipe: ClassVar = MappingProxyType(
        {"tokenizer": {"kind": "bpe", "vocab": 32000, "joint": True}, "pretokenize": "none"}
    )
    expected: ClassVar = MappingProxyType({"train": 440288, "valid": 1166, "test": 1160})

    def pair(self) -> Languages:
        return Languages("ja", "en")

    def bundles(self) -> list[list[Remote]]:
        url = "https://www.phontron.com/kftt/download/kftt-data-1.0.tar.gz"
        return [[Remote("kftt-data-1.0.tar.gz", (url,))]]

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        names = {"train": "kyoto-train", "valid": "kyoto-dev", "test": "kyoto-test"}
        return {
            split: [Part(*files.pair([f"tok/{name}.ja"], [f"tok/{name}.en"]), tokenized=True)]
            for split, name in names.items()
        }
