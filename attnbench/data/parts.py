"""Two files read side by side: sentence pairs as a stream, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from attnbench.core.errors import DataError
from attnbench.data.lines import Line, read_lines

Select = Callable[[Iterable[Line]], Iterable[Line]]


def every_line(lines: Iterable[Line]) -> Iterable[Line]:
    """All lines are sentences: the usual `select`."""
    return lines


class Part(NamedTuple):
    """A piece of a split: two line-aligned files.

    select: which lines are sentences, and their text (both sides must keep equally many).
    tokenized: the text is tokenised as Moses does already, so it is not tokenised again.
    alignment: word alignments in Pharaoh's form, a line for each pair, where they are known.
    every, held: of every so many kept pairs, the k-th (from 1) goes to split held[k] in place of this one.
    held_as_read: pairs that are left out count, too, and what is held is left out for the same reasons as the rest.
    documents: the name of each pair's document, a line for each pair, where that is known; then whole documents are
    held. made_from: the released files, where the two are made from others.
    """

    source: Path
    target: Path
    select: Select = every_line
    tokenized: bool = False
    alignment: Path | None = None
    every: int = 1
    held: Mapping[int, str] = MappingProxyType({})
    held_as_read: bool = False
    documents: Path | None = None
    made_from: tuple[Path, ...] = ()


class Pair(NamedTuple):
    """The two sentences of a pair and where they stand."""

    source: Line
    target: Line
    alignment: str = ""
    document: str = ""


def read_pairs(part: Part) -> Iterator[Pair]:
    """The pairs of a part, in order. Raises DataError when one file has more sentences than the other."""
    pairs = _read_sides(part)
    if part.alignment is not None:
        pairs = _beside(pairs, part.alignment, "alignment", part)
    if part.documents is not None:
        pairs = _beside(pairs, part.documents, "document", part)
    return pairs


def _beside(pairs: Iterator[Pair], path: Path, field: str, part: Part) -> Iterator[Pair]:
    """The pairs, each with its line of the file at `path`."""
    lines = iter(read_lines(path))
    for number, pair in enumerate(pairs, 1):
        line = next(lines, None)
        if line is None:
            raise DataError(f"{path}: ends before line {number}; it needs a line for each pair of {part.source}")
        yield pair._replace(**{field: line.text.strip()})
    extra = next(lines, None)
    if extra is not None:
        raise DataError(f"{path}:{extra.number}: has no pair in {part.source}; remove it")


def _read_sides(part: Part) -> Iterator[Pair]:
    sources, targets = _selected(part, part.source), _selected(part, part.target)
    count = 0
    for source in sources:
        target = next(targets, None)
        if target is None:
            raise _unequal(part, count + 1 + sum(1 for _ in sources), count, part.source, source)
        count += 1
        yield Pair(source, target)
    extra = next(targets, None)
    if extra is not None:
        raise _unequal(part, count, count + 1 + sum(1 for _ in targets), part.target, extra)


def _selected(part: Part, path: Path) -> Iterator[Line]:
    try:
        yield from part.select(read_lines(path))
    except ValueError as error:  # what selects has seen no file
        raise DataError(f"{path}: {error}") from None


def _unequal(part: Part, sources: int, targets: int, longer: Path, first: Line) -> DataError:
    return DataError(
        f"{longer}:{first.number}: has no partner: {part.source} has {sources:,} lines and {part.target} has "
        f"{targets:,}; the two must be aligned line by line: add or remove lines until line n is the translation of "
        "line n"
    )
