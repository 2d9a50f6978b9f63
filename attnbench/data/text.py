"""Raw text to tokenised text and back: the Moses tokeniser (Koehn et al. 2007) as sacremoses has it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Any, TypeVar

X = TypeVar("X")
Clean = Callable[[str], str]


def spaced(line: str) -> str:
    """Words separated by single spaces; every kind of white space is a space."""
    return " ".join(line.split())


def _sacremoses() -> Any:
    import sacremoses  # half a second, and most specs are only looked at

    return sacremoses


@cache
def _tokenizer(language: str) -> Any:
    return _sacremoses().MosesTokenizer(language)


@cache
def _detokenizer(language: str) -> Any:
    return _sacremoses().MosesDetokenizer(language)


@cache
def _normalizer(language: str) -> Any:
    return _sacremoses().MosesPunctNormalizer(language)


def moses_tokenize(language: str, *, split_hyphens: bool = False) -> Clean:
    """Line -> tokenised line, special characters escaped (`&apos;`) as tokenizer.perl does.

    split_hyphens: `a-b` becomes `a @-@ b` (tokenizer.perl -a).
    """
    tokenizer = _tokenizer(language)
    return lambda line: tokenizer.tokenize(line, aggressive_dash_splits=split_hyphens, return_str=True)


def moses_normalize(language: str) -> Clean:
    """Line -> line with plain quotes, dashes and numbers, and a space for each character that does not print, as
    normalize-punctuation.perl and remove-non-printing-char.perl have it (sacremoses would glue words together there).
    """
    normalize = _normalizer(language).normalize
    return lambda line: printing(normalize(line))


def printing(line: str) -> str:
    """A space for each control, format, private or unassigned character (Unicode's categories C)."""
    if line.isprintable():
        return line
    return "".join(" " if unicodedata.category(character)[0] == "C" else character for character in line)


def moses_detokenize(language: str, lines: Iterable[str]) -> list[str]:
    """Tokenised lines -> lines as people write them; escapes are undone."""
    detokenizer = _detokenizer(language)
    return [detokenizer.detokenize(line.split()) for line in lines]


def cleaner(language: str, *, moses: bool, normalize: bool, split_hyphens: bool, lowercase: bool) -> Clean:
    """The steps of a recipe for one language, in the order of the Moses scripts, as one function of a line."""
    steps: list[Clean] = []
    if normalize:
        steps.append(moses_normalize(language))
    if moses:
        steps.append(moses_tokenize(language, split_hyphens=split_hyphens))
    if lowercase:
        steps.append(str.lower)
    steps.append(spaced)

    def clean(line: str) -> str:
        for step in steps:
            line = step(line)
        return line

    return clean


def chunks(items: Iterator[X], size: int) -> Iterator[list[X]]:
    """The items in lists of `size`, the last one shorter."""
    while chunk := list(islice(items, size)):
        yield chunk
