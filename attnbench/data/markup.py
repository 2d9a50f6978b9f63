"""Sentences inside the mark-up of released corpora: TED training files, NIST XML and SGML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from attnbench.data.lines import Line

_META = re.compile(r"<(?:url|talkid|keywords|speaker|reviewer|translator)\b|</?doc\b")
_WRAPPED = re.compile(r"</?(?:title|description)>")
_SEGMENT = re.compile(r"^\s*<seg\b[^>]*>(.*?)</seg>", re.IGNORECASE)
_BEGUN = re.compile(r"<seg\b", re.IGNORECASE)


def tagged_talks(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines of a `train.tags` file of WIT3: data about talks left out, titles and descriptions kept without tags."""
    for number, text in lines:
        if not _META.search(text):
            yield Line(number, _WRAPPED.sub("", text))


def segments(lines: Iterable[Line]) -> Iterator[Line]:
    """The text of each <seg> of NIST XML or SGML that begins a line, entities as they stand (as sacrebleu reads them).

    Raises ValueError where it does not end on its line, or another one begins there.
    """
    for number, text in lines:
        match = _SEGMENT.match(text)
        begun = len(_BEGUN.findall(text)) if match or _BEGUN.match(text.lstrip()) else 0
        if begun > 1 or (begun and not match):
            raise ValueError(f"line {number}: a <seg> that begins a line ends there, alone; put each on one of its own")
        if match:
            yield Line(number, match[1].strip())


def talk_segments(lines: Iterable[Line]) -> Iterator[Line]:
    """`segments` with straight apostrophes, as fairseq's IWSLT'14 script has them."""
    return (Line(number, text.replace("’", "'")) for number, text in segments(lines))


def merged_subwords(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines whose subwords were marked by `@@ ` (subword-nmt), with words whole again."""
    return (Line(number, text.replace("@@ ", "").removesuffix("@@")) for number, text in lines)
