"""IWSLT'14 German-English: TED talks (Cettolo et al. 2014), prepared as fairseq's script does."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from attnbench.core.errors import DataError
from attnbench.data.datasets.base import SPLITS, DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.markup import merged_subwords, tagged_talks, talk_segments
from attnbench.data.parts import Part

_EVERY = 23
_TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
_HUB = "hf://datasets/bbaaaa/iwslt14-de-en-preprocess@refs/convert/parquet/*"


@datasets.register
class Iwslt14DeEn(DatasetSpec):
    """TED talks, German to English: every 23rd pair for validation, dev2010 to tst2012 for test.

    A folder with text tokenised and split already (train, valid, test; `@@` or not) is taken as it is.
    """

    kind: Literal["iwslt14-de-en"] = "iwslt14-de-en"
    title: ClassVar = "IWSLT'14 De-En, TED talks (fairseq's splits)"
    licence: ClassVar = "CC BY-NC-ND 3.0 (TED)"
    by_hand: ClassVar = "https://wit3.fbk.eu (2014-01, de-en) or fairseq's examples/translation"
    recipe: ClassVar = MappingProxyType(
        {
            "tokenizer": {"kind": "bpe", "vocab": 10000, "joint": True},
            "lowercase": True,
            "max_length": 175,
            "max_ratio": 1.5,
        }
    )
    expected: ClassVar = MappingProxyType({"train": 160239, "valid": 7283, "test": 6750})

    def pair(self) -> Languages:
        return Languages("de", "en")

    def bundles(self) -> list[list[Remote]]:
        url = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
        return [[Remote("de-en.tgz", (url,), None, 19_982_877)]]

    def hub(self) -> Hub | None:
        splits = dict(zip(SPLITS, ("train", "validation", "test"), strict=True))
        return Hub({split: f"{_HUB}/{name}/*.parquet" for split, name in splits.items()})

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        if files.find("train.tags.de-en.de") is None:
            made = {split: _names(split) for split in SPLITS}  # of an earlier preparation
            if all(files.find(*side) for sides in made.values() for side in sides):
                found = files.pairs(made)
                folders = dict.fromkeys(path.parent for pair in found.values() for path in pair)
                if len(folders) > 1:
                    raise DataError(
                        f"train, valid and test lie in several folders ({', '.join(map(str, folders))}), and any "
                        "corpus has files of these names; put those of this one into one folder"
                    )
                return {split: [Part(*pair, select=merged_subwords, tokenized=True)] for split, pair in found.items()}
        tests = [files.pair(*([f"IWSLT14.{name}.de-en.{side}.xml"] for side in self.pair())) for name in _TESTS]
        train = files.pair(["train.tags.de-en.de"], ["train.tags.de-en.en"])
        return {
            "train": [Part(*train, select=tagged_talks, every=_EVERY, held={_EVERY: "valid"})],
            "test": [Part(*test, select=talk_segments) for test in tests],
        }


def _names(split: str) -> tuple[list[str], list[str]]:
    return [f"{split}.de", f"{split}.de-en.de"], [f"{split}.en", f"{split}.de-en.en"]
