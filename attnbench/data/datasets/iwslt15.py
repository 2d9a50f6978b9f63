"""IWSLT'15 English-Vietnamese: TED talks as prepared, tokenised, at Stanford (Luong and Manning 2015)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from attnbench.data.datasets.base import SPLITS, DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.parts import Part

_STANFORD = "https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi/"
_MIRROR = "https://raw.githubusercontent.com/stefan-it/nmt-en-vi/master/data/"
_NAMES = dict(zip(SPLITS, ("train", "tst2012", "tst2013"), strict=True))
_MD5 = {
    "train.en": "5b6300f46160ab5a7a995546d2eeb9e6",
    "train.vi": "858e884484885af5775068140ae85dab",
    "tst2012.en": "c14a0955ed8b8d6929fdabf4606e3875",
    "tst2012.vi": "dddf990faa149e980b11a36fca4a8898",
    "tst2013.en": "c41c43cb6d3b122c093ee89608ba62bd",
    "tst2013.vi": "a3185b00264620297901b647a4cacf38",
}
_HUB = "hf://datasets/Angelectronic/IWSLT15_English_Vietnamese@refs/convert/parquet/*"


@datasets.register
class Iwslt15EnVi(DatasetSpec):
    """TED talks, English to Vietnamese: tst2012 for validation, tst2013 for test. The files are tokenised."""

    kind: Literal["iwslt15-en-vi"] = "iwslt15-en-vi"
    title: ClassVar = "IWSLT'15 En-Vi, TED talks (Stanford)"
    licence: ClassVar = "CC BY-NC-ND 3.0 (TED)"
    by_hand: ClassVar = "https://nlp.stanford.edu/projects/nmt or https://github.com/stefan-it/nmt-en-vi"
    recipe: ClassVar = MappingProxyType(
        {"tokenizer": {"kind": "bpe", "vocab": 32768, "joint": True}, "pretokenize": "none"}
    )
    expected: ClassVar = MappingProxyType({"train": 133317, "valid": 1553, "test": 1268})

    def pair(self) -> Languages:
        return Languages("en", "vi")

    def bundles(self) -> list[list[Remote]]:
        plain = [Remote(name, (_STANFORD + name,), f"md5:{md5}") for name, md5 in _MD5.items()]
        packed = ("train-en-vi.tgz", "dev-2012-en-vi.tgz", "test-2013-en-vi.tgz")
        return [plain, [Remote(name, (_MIRROR + name,)) for name in packed]]

    def hub(self) -> Hub | None:
        splits = dict(zip(SPLITS, ("train", "validation", "test"), strict=True))
        files = {_NAMES[split]: f"{_HUB}/{name}/*.parquet" for split, name in splits.items()}
        return Hub(files, "an edited copy of IWSLT'15 En-Vi; do not set its numbers beside published ones")

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        names = {split: [[f"{name}.en"], [f"{name}.vi"]] for split, name in _NAMES.items()}
        return {split: [Part(*pair, tokenized=True)] for split, pair in files.pairs(names).items()}
