"""Sentences inside the mark-up of released corpora: TED training files, NIST XML and SGML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from attnbench.data.lines import Line

_META = re.compile(r"<(?:url|talkid|keywords|speaker|reviewer|translator)\b|</?doc\b")
_WRAPPED = re.compile(r"</?(?:title|description)>")
_SEGMENT = re.compile(r"^\s*<seg\b[^>]*>\s*(.*?)\s*</seg>")


def tagged_talks(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines of a `train.tags` file of WIT3: data about talks left out, titles and descriptions kept without tags."""
    for number, text in lines:
        if not _META.search(text):
            yield Line(number, _WRAPPED.sub("", text))


def segments(lines: Iterable[Line]) -> Iterator[Line]:
    """The text of each <seg> of NIST XML or SGML, entities as they stand (as sacrebleu reads them)."""
    for number, text in lines:
        match = _SEGMENT.match(text)
        if match:
            yield Line(number, match[1])


def talk_segments(lines: Iterable[Line]) -> Iterator[Line]:
    """`segments` with straight apostrophes, as fairseq's IWSLT'14 script has them."""
    return (Line(number, text.replace("’", "'")) for number, text in segments(lines))


def merged_subwords(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines whose subwords were marked by `@@ ` (subword-nmt), with words whole again."""
    return (Line(number, text.replace("@@ ", "").removesuffix("@@")) for number, text in lines)
