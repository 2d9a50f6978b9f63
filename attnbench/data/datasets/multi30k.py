"""Multi30k, task 1: descriptions of images (Elliott, Frank, Sima'an, Specia 2016), English with German or French."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from attnbench.data.datasets.base import SPLITS, DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.parts import Part

_NAMES = dict(zip(SPLITS, ("train", "val", "test_2016_flickr"), strict=True))
_URLS = (
    "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/",
    "https://cdn.jsdelivr.net/gh/multi30k/dataset@master/data/task1/raw/",
)
_FILES = {
    "train.de.gz": ("sha256:726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6", 637044),
    "train.en.gz": ("sha256:d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f", 568929),
    "train.fr.gz": ("sha256:622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c", 604242),
    "val.de.gz": ("sha256:f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a", 24681),
    "val.en.gz": ("sha256:14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28", 21650),
    "val.fr.gz": ("sha256:ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9", 23001),
    "test_2016_flickr.de.gz": ("sha256:9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8", 22890),
    "test_2016_flickr.en.gz": ("sha256:611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9", 21077),
    "test_2016_flickr.fr.gz": ("sha256:6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90", 22310),
}


class Multi30k(DatasetSpec):
    """Splits train, val and test_2016_flickr, raw text."""

    title: ClassVar = "Multi30k, task 1 (test_2016_flickr)"
    licence: ClassVar = "CC BY-NC-SA 4.0"
    by_hand: ClassVar = "https://github.com/multi30k/dataset, folder data/task1/raw"
    recipe: ClassVar = MappingProxyType({"tokenizer": {"kind": "bpe", "vocab": 8000, "joint": True}, "lowercase": True})
    expected: ClassVar = MappingProxyType({"train": 29000, "valid": 1014, "test": 1000})

    def pair(self) -> Languages:
        return Languages(*self.kind.split("-")[1:])

    def bundles(self) -> list[list[Remote]]:
        names = [f"{name}.{language}.gz" for name in _NAMES.values() for language in self.pair()]
        return [[Remote(name, tuple(url + name for url in _URLS), *_FILES[name]) for name in names]]

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        names = {split: [[f"{name}.{language}.gz"] for language in self.pair()] for split, name in _NAMES.items()}
        return {split: [Part(*pair)] for split, pair in files.pairs(names).items()}


@datasets.register
class Multi30kDeEn(Multi30k):
    """Image descriptions, German to English."""

    kind: Literal["multi30k-de-en"] = "multi30k-de-en"


@datasets.register
class Multi30kEnDe(Multi30k):
    """Image descriptions, English to German."""

    kind: Literal["multi30k-en-de"] = "multi30k-en-de"


@datasets.register
class Multi30kFrEn(Multi30k):
    """Image descriptions, French to English."""

    kind: Literal["multi30k-fr-en"] = "multi30k-fr-en"


@datasets.register
class Multi30kEnFr(Multi30k):
    """Image descriptions, English to French."""

    kind: Literal["multi30k-en-fr"] = "multi30k-en-fr"
