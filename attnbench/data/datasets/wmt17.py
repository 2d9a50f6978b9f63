"""WMT'17 news from English, as the task released it tokenised and true-cased (Bojar et al. 2017)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from attnbench.data.datasets.base import SPLITS, DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.parts import Part

_PREPROCESSED = "https://data.statmt.org/wmt17/translation-task/preprocessed"
_HUB = "hf://datasets/wmt"
_TRAIN, _TEST = "corpus", "newstest2016"


class Wmt17(DatasetSpec):
    """Splits corpus, newstest2015 and newstest2016, English to another language: what Britz, Guan and Luong (2017) use.

    The released text was tokenised by Moses with hyphens split and true-cased; it is taken as it is. The recipe's
    tokenisation is for lines that come later, and for files called like the released ones without `.tc`: raw text.
    """

    title: ClassVar = "WMT'17 from English, tokenised and true-cased (newstest2016)"
    licence: ClassVar = "free for research (statmt.org)"
    by_hand: ClassVar = f"{_PREPROCESSED}, the folder of the language pair"
    recipe: ClassVar = MappingProxyType(
        {"tokenizer": {"kind": "bpe", "vocab": 16000, "joint": True}, "normalize": True, "split_hyphens": True}
    )
    language: ClassVar[str]
    development: ClassVar[str] = "newstest2015"
    on_hub: ClassVar[bool] = False
    """Whether the hub has these splits; raw text all the same."""

    def pair(self) -> Languages:
        return Languages("en", self.language)

    def bundles(self) -> list[list[Remote]]:
        released = (*(f"{_TRAIN}.tc.{language}.gz" for language in self.pair()), "dev.tgz")
        return [[Remote(name, (f"{_PREPROCESSED}/{self.language}-en/{name}",)) for name in released]]

    def hub(self) -> Hub | None:
        if not self.on_hub:
            return None
        places = ("wmt17/{}-en/train", "wmt16/{}-en/validation", "wmt16/{}-en/test")
        files = [f"{_HUB}/{place.format(self.language)}-*.parquet" for place in places]
        note = "the raw text of WMT'17, not true-cased and not cleaned; do not set its numbers beside published ones"
        return Hub(dict(zip(self._names(), files, strict=True)), note)

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        released = files.find(f"{_TRAIN}.tc.{self.language}") is not None
        raw = not released and files.find(f"{_TRAIN}.{self.language}") is not None
        stems = [name if raw else f"{name}.tc" for name in self._names()]  # all raw or none
        return {
            split: [Part(*files.pair(*([f"{stem}.{language}"] for language in self.pair())), tokenized=not raw)]
            for split, stem in zip(SPLITS, stems, strict=True)
        }

    def _names(self) -> tuple[str, str, str]:
        return _TRAIN, self.development, _TEST


@datasets.register
class Wmt17Cs(Wmt17):
    """News, English to Czech; valid is newstest2015, test newstest2016."""

    kind: Literal["wmt17-cs"] = "wmt17-cs"
    title: ClassVar = "WMT'17 En-Cs, tokenised and true-cased (newstest2016)"
    licence: ClassVar = "free for non-commercial research (statmt.org, CzEng)"
    expected: ClassVar = MappingProxyType({"valid": 2656, "test": 2999})
    language: ClassVar = "cs"


@datasets.register
class Wmt17De(Wmt17):
    """News, English to German; valid is newstest2015, test newstest2016."""

    kind: Literal["wmt17-de"] = "wmt17-de"
    title: ClassVar = "WMT'17 En-De, tokenised and true-cased (newstest2016)"
    expected: ClassVar = MappingProxyType({"train": 5852458, "valid": 2169, "test": 2999})
    language: ClassVar = "de"
    on_hub: ClassVar = True


@datasets.register
class Wmt17Fi(Wmt17):
    """News, English to Finnish; valid is newstest2015, test newstest2016 with the first of its two references."""

    kind: Literal["wmt17-fi"] = "wmt17-fi"
    title: ClassVar = "WMT'17 En-Fi, tokenised and true-cased (newstest2016)"
    expected: ClassVar = MappingProxyType({"valid": 1370, "test": 3000})
    language: ClassVar = "fi"


@datasets.register
class Wmt17Tr(Wmt17):
    """News, English to Turkish; valid is newsdev2016 (there is no newstest2015), test newstest2016."""

    kind: Literal["wmt17-tr"] = "wmt17-tr"
    title: ClassVar = "WMT'17 En-Tr, tokenised and true-cased (newstest2016)"
    licence: ClassVar = "free for research (statmt.org, OPUS)"
    expected: ClassVar = MappingProxyType({"valid": 1001, "test": 3000})
    language: ClassVar = "tr"
    development: ClassVar = "newsdev2016"
    on_hub: ClassVar = True
