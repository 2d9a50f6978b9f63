"""IWSLT'17 French-English: TED talks in the XML of WIT3 (Cettolo et al. 2017)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from attnbench.core.errors import DataError
from attnbench.data.datasets.base import DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.markup import segments, tagged_talks
from attnbench.data.parts import Part

Year = Literal["dev2010", "tst2010", "tst2011", "tst2012", "tst2013", "tst2014", "tst2015"]
_VALID: list[Year] = ["dev2010"]
_TEST: list[Year] = ["tst2010", "tst2011", "tst2012", "tst2013", "tst2014", "tst2015"]
_URL = "https://raw.githubusercontent.com/hlt-mt/WIT3/master/archive/2017-01-trnted/texts/fr/en/fr-en.tgz"
_HUB = "hf://datasets/IWSLT/iwslt2017@refs/convert/parquet/iwslt2017-fr-en"


@datasets.register
class Iwslt17FrEn(DatasetSpec):
    """TED talks, French to English."""

    kind: Literal["iwslt17-fr-en"] = "iwslt17-fr-en"
    title: ClassVar = "IWSLT'17 Fr-En, TED talks"
    licence: ClassVar = "CC BY-NC-ND 3.0 (TED)"
    by_hand: ClassVar = "https://github.com/hlt-mt/WIT3, archive/2017-01-trnted/texts/fr/en"
    wrappers: ClassVar = ("2017-01-trnted.tgz",)
    recipe: ClassVar = MappingProxyType(
        {"tokenizer": {"kind": "bpe", "vocab": 10000, "joint": True}, "max_length": 175, "max_ratio": 1.5}
    )
    valid: list[Year] = Field(default=_VALID, min_length=1)
    """The sets to validate on, joined."""
    test: list[Year] = Field(default=_TEST, min_length=1)
    """The sets to test on, joined."""

    def pair(self) -> Languages:
        return Languages("fr", "en")

    def bundles(self) -> list[list[Remote]]:
        return [[Remote("fr-en.tgz", (_URL,), "md5:19927da9de0f40348cad9c0fc61642ac")]]

    def hub(self) -> Hub | None:
        if (self.valid, self.test) != (_VALID, _TEST):
            return None  # the copy has these splits alone
        return Hub({name: f"{_HUB}/{name}/*.parquet" for name in ("train", "validation", "test")})

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        if files.find("train.tags.fr-en.fr") is None and files.find("validation.fr") is not None:
            if self.hub() is None:
                raise DataError("the hub's copy holds the usual valid and test sets alone; leave both keys out")
            copied = {"train": "train", "valid": "validation", "test": "test"}
            return {split: [Part(*files.pair([f"{name}.fr"], [f"{name}.en"]))] for split, name in copied.items()}
        train = files.pair(["train.tags.fr-en.fr"], ["train.tags.fr-en.en"])
        return {
            "train": [Part(*train, select=tagged_talks)],
            "valid": [_evaluation(files, year) for year in self.valid],
            "test": [_evaluation(files, year) for year in self.test],
        }


def _evaluation(files: Finder, year: Year) -> Part:
    names = [[f"IWSLT17.TED.{year}.fr-en.{side}.xml"] for side in ("fr", "en")]
    return Part(*files.pair(*names), select=segments)
