"""Finds the released files of a corpus in a folder, whatever the nesting and however they are packed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attnbench.core.errors import DataError
from attnbench.data.lines import SUFFIXES

log = logging.getLogger("attnbench")


class Finder:
    """An index of folders by file name; `.gz` and `.xz` at the end of a name do not matter.

    A name may say the folder that the file is in, `tok/kyoto-dev.ja`, where others have a file of that name, too.
    Of several files with one name that nearest the top is taken, and an earlier folder goes before a later one.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders: list[Path] = []
        self.missing: list[str] = []
        self._files: dict[str, list[Path]] = {}
        for folder in folders:
            self.add(folder)

    def add(self, folder: Path) -> None:
        """Index one more folder, after those there are. Raises DataError if it is not a folder."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        self.folders.append(folder)
        for path in sorted(files_below(folder), key=lambda path: (len(path.parts), str(path))):
            self._files.setdefault(bare(path.name), []).append(path)
            self._files.setdefault(f"{path.parent.name}/{bare(path.name)}", []).append(path)

    def find(self, *names: str) -> Path | None:
        """The first of the names that is there; a name may end in `.gz` or `.xz` or not."""
        return next(iter(self._all(names)), None)

    def _all(self, names: Iterable[str]) -> list[Path]:
        """All files of the first name, then those of the second."""
        return [path for name in names for path in self._files.get(bare(name), ())]

    def pair(self, sources: Iterable[str], targets: Iterable[str]) -> tuple[Path, Path]:
        """The two files of a part; each is given the names that it may have, the released one first.

        Two in one folder are taken before others: every pair of languages has its own English, under one name. What is
        not there is noted in `missing` (and stands in the result by its name), so that one message names all.
        """
        sources, targets = list(sources), list(targets)
        found = self._all(sources), self._all(targets)
        together = next(self._together(sources, targets), None)
        if together is not None:
            return together
        if found[0] and found[1] and (len(found[0]) > 1 or len(found[1]) > 1):
            log.warning(
                "%s and %s lie in two folders, and there are others of their names: see that one translates the other",
                found[0][0], found[1][0],
            )  # fmt: skip
        return self._must(sources), self._must(targets)

    def pairs(self, parts: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, tuple[Path, Path]]:
        """The two files of each part, by the names that `pair` takes; those of a folder that holds all parts before
        others, for every corpus has its own `train.de`. A warning tells where they lie in several folders."""
        first = next(iter(parts.values()))
        for folder in dict.fromkeys(source.parent for source, _ in self._together(*first)):
            inside = {
                part: next((pair for pair in self._together(*sides) if pair[0].parent == folder), None)
                for part, sides in parts.items()
            }
            whole = {part: pair for part, pair in inside.items() if pair is not None}
            if len(whole) == len(parts):
                return whole
        before = len(self.missing)
        found = {part: self.pair(*sides) for part, sides in parts.items()}
        if len(self.missing) == before and len({pair[0].parent for pair in found.values()}) > 1:
            log.warning(
                "%s lie in several folders: see that they are of one corpus",
                ", ".join(str(source) for source, _ in found.values()),
            )
        return found

    def _together(self, sources: Sequence[str], targets: Sequence[str]) -> Iterator[tuple[Path, Path]]:
        """Both files of a part in one folder, those before that `pair` takes first."""
        for source in self._all(sources):
            for target in self._all(targets):
                if source.parent == target.parent:
                    yield source, target

    def one(self, *names: str) -> Path:
        """A file that is both sides of a part; as `pair` otherwise."""
        return self._must(list(names))

    def _must(self, names: list[str]) -> Path:
        path = self.find(*names)
        if path is None:
            self.missing.append(" or ".join(names))
            return Path(names[0])
        return path


def files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and of those below it, linked ones too, hidden ones not."""
    return _files_below(folder, frozenset())


def _files_below(folder: Path, above: frozenset[str]) -> Iterator[Path]:
    """above: the folders that it is in, to which a link leads no further."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = list(folder.iterdir())
    except PermissionError:  # as the lost+found of a disk
        return
    for path in entries:
        if path.name.startswith("."):  # a trash, a repository, what a killed process left
            continue
        if os.path.isdir(path):  # Path's own raise below a folder that may be listed and not entered
            yield from _files_below(path, above | {real})
        elif os.path.isfile(path):
            yield path


def bare(name: str) -> str:
    """A file name without its packing."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name
