"""Alignments of eflomal, if it is installed (Östling & Tiedemann 2016, Efficient Word Alignment with MCMC)."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attnbench.core.errors import MissingExtraError
from attnbench.data.alignment.links import Links, read_links, words
from attnbench.data.alignment.symmetrize import Method, require_method, symmetrize


def align_eflomal(
    sources: Sequence[str],
    targets: Sequence[str],
    method: Method = "grow-diag-final-and",
    *,
    train: tuple[Sequence[str], Sequence[str]] = ((), ()),
    lowercase: bool = False,
) -> list[Links]:
    """The links of each pair of tokenised lines, sorted; it samples, so no two runs are quite the same.

    train: more text to learn from, aligned along with the rest.
    Raises ValueError for sides of unequal length or an unknown method, and MissingExtraError if eflomal is absent.
    """
    aligner = _package().Aligner()
    require_method(method)
    pairs = [*zip(sources, targets, strict=True), *zip(*train, strict=True)]
    if not any(words(source) and words(target) for source, target in pairs):  # it would divide by zero
        return [[] for _ in sources]
    number = _numbering(lowercase)
    with tempfile.TemporaryDirectory() as folder:
        forward, reverse = Path(folder, "forward"), Path(folder, "reverse")
        source, target = ([number(line) for line in side] for side in zip(*pairs, strict=True))
        aligner.align(source, target, links_filename_fwd=str(forward), links_filename_rev=str(reverse))
        both = list(zip(read_links(forward), read_links(reverse), strict=True))
    return [symmetrize(*each, method) for each in both[: len(sources)]]


def _package() -> Any:
    try:
        return importlib.import_module("eflomal")
    except ImportError:
        raise MissingExtraError("eflomal is not installed; pip install 'attnbench[align]', or use ibm2") from None


def _numbering(lowercase: bool) -> Callable[[str], str]:
    """Line -> numbers in place of words: eflomal parts words at every kind of white space, and ignores case."""
    numbers: dict[str, str] = {}

    def number(line: str) -> str:
        sentence = words(line.lower() if lowercase else line)
        for word in sentence:
            if word not in numbers:
                numbers[word] = str(len(numbers))
        return " ".join(numbers[word] for word in sentence)

    return number
