"""Links between the words of a sentence pair, in memory and in files; always (source, target), counted from 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from attnbench.core.errors import DataError
from attnbench.core.files import write_lines
from attnbench.data.lines import read_lines

Link = tuple[int, int]
Links = list[Link]

_LINK = re.compile(r"([0-9]+)-([0-9]+)")
_GOLD = re.compile(r"(\*?)([0-9]+)([-p])([0-9]+)")


class Gold(NamedTuple):
    """The links that people set in one pair. possible: the sure ones among them."""

    sure: Links
    possible: Links


def format_links(links: Iterable[Link]) -> str:
    """Pharaoh's form: `0-0 1-2`; no links give an empty line."""
    return " ".join(f"{source}-{target}" for source, target in links)


def parse_links(line: str, place: str = "<text>") -> Links:
    """The links of a line in Pharaoh's form, in its order. Raises DataError, which begins with `place`."""
    links: Links = []
    for word in line.split():
        found = _LINK.fullmatch(word)
        if found is None:
            raise DataError(f"{place}: '{word}' is no link; write source-target, counted from 0, like 0-0 1-2")
        links.append((int(found[1]), int(found[2])))
    return links


def read_links(path: Path) -> list[Links]:
    """One alignment a line. Raises DataError that names file and line."""
    return [parse_links(line.text, f"{path}:{line.number}") for line in read_lines(path)]


def write_links(path: Path, alignments: Iterable[Iterable[Link]]) -> None:
    """One alignment a line; see write_atomic."""
    write_lines(path, map(format_links, alignments))


def parse_gold(line: str, place: str = "<text>", *, first: int = 0) -> Gold:
    """Sure links `s-t`, possible ones `*s-t` or `spt`; a link given both ways is sure.

    first: the number of the first word, 0 or 1. Raises DataError, which begins with `place`.
    """
    sure: set[Link] = set()
    possible: set[Link] = set()
    for word in line.split():
        found = _GOLD.fullmatch(word)
        if found is None or (found[1] and found[3] == "p"):
            raise DataError(
                f"{place}: '{word}' is no link; write s-t where it is sure, *s-t or spt where it is possible"
            )
        link = int(found[2]) - first, int(found[4]) - first
        if min(link) < 0:
            raise DataError(f"{place}: '{word}' names word 0, yet words count from {first}; count from 0")
        possible.add(link)
        if found[3] == "-" and not found[1]:
            sure.add(link)
    return Gold(sorted(sure), sorted(possible))


def read_gold(path: Path, sources: Sequence[str], targets: Sequence[str], *, first: int = 0) -> list[Gold]:
    """The gold alignments of a text, one a line; see parse_gold.

    Raises DataError that names file and line: a malformed link, one beyond its sentence, not as many lines as pairs.
    """
    gold: list[Gold] = []
    lines = list(read_lines(path))
    if len(lines) > len(sources):  # before a link is held against a pair that is not its own
        raise DataError(
            f"{path}:{len(sources) + 1}: has no sentence pair; there are {len(sources):,}, and each needs one line here"
        )
    for number, text in lines:
        place = f"{path}:{number}"
        gold.append(parse_gold(text, place, first=first))
        _check_within(gold[-1].possible, sources[number - 1], targets[number - 1], place, first)
    if len(gold) < len(sources):
        raise DataError(f"{path}: ends after line {len(gold)}; each of the {len(sources):,} sentence pairs needs one")
    return gold


def words(line: str) -> list[str]:
    """The words of a tokenised line. Only the ASCII space parts them: a wide space is a word of Japanese text."""
    return [word for word in line.split(" ") if word]


def _check_within(links: Links, source: str, target: str, place: str, first: int) -> None:
    lengths = len(words(source)), len(words(target))
    for link in links:
        if link[0] >= lengths[0] or link[1] >= lengths[1]:
            mend = "" if first else "; do the links count from 1?"
            raise DataError(
                f"{place}: link {link[0] + first}-{link[1] + first} lies beyond the pair's {lengths[0]} source and "
                f"{lengths[1]} target words (counted from {first}){mend}"
            )
