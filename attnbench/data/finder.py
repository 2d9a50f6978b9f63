"""Finds the released files of a corpus in a folder, whatever the nesting and however they are packed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from attnbench.core.errors import DataError
from attnbench.data.lines import SUFFIXES


class Finder:
    """An index of folders by file name; `.gz` and `.xz` at the end of a name do not matter.

    A name may say the folder that the file is in, `tok/kyoto-dev.ja`, where others have a file of that name, too.
    Of several files with one name that nearest the top is taken, and an earlier folder goes before a later one.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders: list[Path] = []
        self.missing: list[str] = []
        self._files: dict[str, Path] = {}
        for folder in folders:
            self.add(folder)

    def add(self, folder: Path) -> None:
        """Index one more folder, after those there are. Raises DataError if it is not a folder."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        self.folders.append(folder)
        found = [path for path in files_below(folder) if not path.name.startswith(".")]
        for path in sorted(found, key=lambda path: (len(path.parts), str(path))):
            self._files.setdefault(bare(path.name), path)
            self._files.setdefault(f"{path.parent.name}/{bare(path.name)}", path)

    def find(self, *names: str) -> Path | None:
        """The first of the names that is there; a name may end in `.gz` or `.xz` or not."""
        for name in names:
            path = self._files.get(bare(name))
            if path is not None:
                return path
        return None

    def pair(self, sources: Iterable[str], targets: Iterable[str]) -> tuple[Path, Path]:
        """The two files of a part; each is given the names that it may have, the released one first.

        What is not there is noted in `missing` (and stands in the result by its name), so that one message names all.
        """
        return self._must(list(sources)), self._must(list(targets))

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
    """The files of a folder and of those below it, linked ones too."""
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
        if path.is_dir():
            yield from _files_below(path, above | {real})
        elif path.is_file():
            yield path


def bare(name: str) -> str:
    """A file name without its packing."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name
