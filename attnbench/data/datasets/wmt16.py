"""WMT'16 English-Romanian: Europarl v7 and SETIMES2 (Bojar et al. 2016)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from attnbench.data.datasets._wmt import evaluation_archive, evaluation_part
from attnbench.data.datasets.base import DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.parts import Part
from attnbench.data.text import Clean

EUROPARL = "https://www.statmt.org/europarl/v7/ro-en.tgz"
_SETIMES = (
    "https://object.pouta.csc.fi/OPUS-SETIMES/v2/moses/en-ro.txt.zip",
    "https://opus.nlpl.eu/legacy/download.php?f=SETIMES/v2/moses/en-ro.txt.zip",
)
_HUB = "hf://datasets/wmt/wmt16/ro-en"
_CEDILLA = str.maketrans("ŞşŢţ", "ȘșȚț")
_PLAIN = str.maketrans("ȘșȚțĂăÂâÎî", "SsTtAaAaIi")


@datasets.register
class Wmt16EnRo(DatasetSpec):
    """Parliament and news, English to Romanian; valid is newsdev2016, test newstest2016."""

    kind: Literal["wmt16-en-ro"] = "wmt16-en-ro"
    title: ClassVar = "WMT'16 En-Ro (newstest2016)"
    licence: ClassVar = "free for research (statmt.org, OPUS)"
    by_hand: ClassVar = "https://www.statmt.org/wmt16/translation-task.html and https://opus.nlpl.eu/SETIMES"
    recipe: ClassVar = MappingProxyType(
        {
            "tokenizer": {"kind": "bpe", "vocab": 40000, "joint": True},
            "normalize": True,
            "max_length": 80,
            "max_ratio": 9.0,
        }
    )
    expected: ClassVar = MappingProxyType({"train": 608319, "valid": 1999, "test": 1999})
    diacritics: Literal["keep", "remove"] = "keep"
    """Romanian diacritics; `remove` moves BLEU by over 10 points, so never set one beside the other."""

    def pair(self) -> Languages:
        return Languages("en", "ro")

    def repair(self, language: str) -> Clean | None:
        if language != "ro":
            return None
        return comma_below if self.diacritics == "keep" else without_diacritics

    def bundles(self) -> list[list[Remote]]:
        return [
            [
                Remote("ro-en.tgz", (EUROPARL,)),
                Remote("en-ro.txt.zip", _SETIMES),
                evaluation_archive("wmt16/dev", "dev.tgz"),
                evaluation_archive("wmt16", "test.tgz"),
            ]
        ]

    def hub(self) -> Hub | None:
        splits = {"train": "train", "newsdev2016": "validation", "newstest2016": "test"}
        return Hub({name: f"{_HUB}/{split}-*.parquet" for name, split in splits.items()})

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        languages = self.pair()
        if files.find("europarl-v7.ro-en.ro") is None and files.find("train.ro") is not None:
            train = [Part(*files.pair(["train.en"], ["train.ro"]))]
        else:
            setimes = ([f"SETIMES.en-ro.{side}", f"SETIMES2.en-ro.{side}"] for side in languages)
            train = [
                Part(*files.pair(*([f"europarl-v7.ro-en.{side}"] for side in languages))),
                Part(*files.pair(*setimes)),
            ]
        return {
            "train": train,
            "valid": [evaluation_part(files, "wmt16/dev", "newsdev2016", languages)],
            "test": [evaluation_part(files, "wmt16", "newstest2016", languages)],
        }


def comma_below(text: str) -> str:
    """Romanian s and t with comma below; old files have a cedilla there."""
    return text.translate(_CEDILLA)


def without_diacritics(text: str) -> str:
    """Romanian letters without breve, circumflex and comma (remove-diacritics.py of wmt16-scripts); others as they
    are."""
    return comma_below(text).translate(_PLAIN)
