"""WMT'14 English-German: Europarl v7, Common Crawl and News Commentary (Bojar et al. 2014)."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from attnbench.data.datasets._wmt import evaluation_archive, evaluation_part
from attnbench.data.datasets.base import DatasetSpec, Languages, Remote, datasets
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.parts import Part

_STATMT = "https://www.statmt.org/"
_NEWS = {
    "v9": ("training-parallel-nc-v9.tgz", _STATMT + "wmt14/training-parallel-nc-v9.tgz"),
    "v12": (
        "training-parallel-nc-v12.tgz",
        "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
    ),
}
_HUB = "hf://datasets/wmt/wmt14/de-en"


@datasets.register
class Wmt14EnDe(DatasetSpec):
    """News and parliament, English to German, 4.5 million pairs; test is the full newstest2014."""

    kind: Literal["wmt14-en-de"] = "wmt14-en-de"
    title: ClassVar = "WMT'14 En-De (newstest2014 full)"
    licence: ClassVar = "free for research (statmt.org)"
    by_hand: ClassVar = "https://www.statmt.org/wmt14/translation-task.html"
    wrappers: ClassVar = ("dev.tgz",)
    recipe: ClassVar = MappingProxyType(
        {
            "tokenizer": {"kind": "bpe", "vocab": 32768, "joint": True},
            "normalize": True,
            "split_hyphens": True,
            "max_length": 250,
            "max_ratio": 1.5,
        }
    )
    expected: ClassVar = MappingProxyType({"test": 3003})
    valid: Literal["newstest2013", "every_100th"] = "newstest2013"
    """The papers' newstest2013, or every 100th line of the training text, cleaned as it is (fairseq)."""
    news_commentary: Literal["v9", "v12"] = "v9"
    """Which News Commentary: of WMT'14, or the later one that fairseq and others take."""

    def pair(self) -> Languages:
        return Languages("en", "de")

    def bundles(self) -> list[list[Remote]]:
        name, url = _NEWS[self.news_commentary]
        remotes = [
            Remote("training-parallel-europarl-v7.tgz", (_STATMT + "wmt13/training-parallel-europarl-v7.tgz",)),
            Remote("training-parallel-commoncrawl.tgz", (_STATMT + "wmt13/training-parallel-commoncrawl.tgz",)),
            Remote(name, (url,)),
            evaluation_archive("wmt14/full", "test-full.tgz"),
        ]
        if self.valid == "newstest2013":
            remotes.append(evaluation_archive("wmt13", "test.tgz"))
        return [remotes]

    def hub(self) -> Hub | None:
        if self.valid != "newstest2013" or self.news_commentary != "v9":
            return None  # it has one training set
        splits = {"train": "train", "newstest2013": "validation", "newstest2014": "test"}
        return Hub({name: f"{_HUB}/{split}-*.parquet" for name, split in splits.items()})

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        languages = self.pair()
        news = f"news-commentary-{self.news_commentary}.de-en"
        stems = ["europarl-v7.de-en", "commoncrawl.de-en", news]
        if files.find(f"{stems[0]}.en") is None and files.find("train.en") is not None:
            stems = ["train"]  # one corpus, joined already
        train = [Part(*files.pair(*([f"{stem}.{language}"] for language in languages))) for stem in stems]
        parts = {"test": [evaluation_part(files, "wmt14/full", "newstest2014", languages)]}
        if self.valid == "every_100th":
            return {
                **parts,
                "train": [part._replace(every=100, held={100: "valid"}, held_as_read=True) for part in train],
            }
        return {**parts, "train": train, "valid": [evaluation_part(files, "wmt13", "newstest2013", languages)]}
