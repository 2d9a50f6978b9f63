"""News commentary as documents, English-German, in the release of Maruf, Martins and Haffari (2019)."""

from __future__ import annotations

from typing import ClassVar, Literal

from attnbench.data.datasets._selective import Selective
from attnbench.data.datasets.base import datasets


@datasets.register
class NewsCommentaryDoc(Selective):
    """News-Commentary v11, English to German, with its bounds; validated on newstest2015, tested on newstest2016."""

    kind: Literal["nc-doc"] = "nc-doc"
    title: ClassVar = "News-Commentary v11 as documents, En-De"
    by_hand: ClassVar = "https://github.com/sameenmaruf/selective-attn, data/NC-2016"
    folder: ClassVar = "NC-2016"
