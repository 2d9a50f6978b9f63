"""Europarl v7, Romanian-English, scored on news (Koehn 2005; the setting of Malaviya et al. 2018)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from attnbench.data.datasets._wmt import evaluation_archive, evaluation_part
from attnbench.data.datasets.base import DatasetSpec, Languages, Remote, datasets
from attnbench.data.datasets.wmt16 import EUROPARL, comma_below
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.parts import Part
from attnbench.data.text import Clean


@datasets.register
class EuroparlRoEn(DatasetSpec):
    """Parliament, Romanian to English; valid is newsdev2016, test newstest2016. Romanian s and t get their comma."""

    kind: Literal["europarl-ro-en"] = "europarl-ro-en"
    title: ClassVar = "Europarl v7 Ro-En (newstest2016)"
    licence: ClassVar = "free for research (statmt.org)"
    by_hand: ClassVar = "https://www.statmt.org/europarl and https://www.statmt.org/wmt16/translation-task.html"
    recipe: ClassVar = MappingProxyType({"tokenizer": {"kind": "bpe", "vocab": 32000, "joint": True}})
    expected: ClassVar = MappingProxyType({"train": 399375, "valid": 1999, "test": 1999})

    def pair(self) -> Languages:
        return Languages("ro", "en")

    def repair(self, language: str) -> Clean | None:
        return comma_below if language == "ro" else None

    def bundles(self) -> list[list[Remote]]:
        evaluation = [evaluation_archive("wmt16/dev", "dev.tgz"), evaluation_archive("wmt16", "test.tgz")]
        return [[Remote("ro-en.tgz", (EUROPARL,)), *evaluation]]

    def hub(self) -> Hub | None:
        wmt = "hf://datasets/wmt/wmt16/ro-en"
        return Hub(
            {
                "europarl-v7.ro-en": "hf://datasets/Helsinki-NLP/europarl/en-ro/*.parquet",
                "newsdev2016": f"{wmt}/validation-*.parquet",
                "newstest2016": f"{wmt}/test-*.parquet",
            },
            "Europarl as OPUS aligned it (v8), not the release of statmt.org",
        )

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        languages = self.pair()
        return {
            "train": [Part(*files.pair(*([f"europarl-v7.ro-en.{side}"] for side in languages)))],
            "valid": [evaluation_part(files, "wmt16/dev", "newsdev2016", languages)],
            "test": [evaluation_part(files, "wmt16", "newstest2016", languages)],
        }
