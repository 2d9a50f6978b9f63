"""TED talks as documents, English-German: IWSLT'17 in the release of Maruf, Martins and Haffari (2019)."""

from __future__ import annotations

from typing import ClassVar, Literal

from attnbench.data.datasets._selective import Selective
from attnbench.data.datasets.base import datasets


@datasets.register
class TedDoc(Selective):
    """TED talks, English to German, with their bounds; tests on the talks of tst2016 and tst2017."""

    kind: Literal["ted-doc"] = "ted-doc"
    title: ClassVar = "TED talks as documents, En-De"
    licence: ClassVar = "CC BY-NC-ND 3.0 (TED)"
    by_hand: ClassVar = "https://github.com/sameenmaruf/selective-attn, data/IWSLT2017"
    folder: ClassVar = "IWSLT2017"
