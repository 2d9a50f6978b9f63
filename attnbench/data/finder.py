"""Finds the released files of a corpus in a folder, whatever the nesting and however they are packed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attnbench.core.errors import DataError
from attnbench.data.lines import SUFFIXES


class Finder:
    """An index of folders by file name; `.gz` and `.xz` at the end of a name do not matter.

    Of several files with one name that nearest the top is taken, and an earlier folder goes before a later one.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders: list[Path] = []
        self._files: dict[str, Path] = {}
        self.used: list[Path] = []
        for folder in folders:
            self.add(folder)

    def add(self, folder: Path) -> None:
        """Index one more folder, after those there are. Raises DataError if it is not a folder."""
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        self.folders.append(folder)
        found = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        for path in sorted(found, key=lambda path: (len(path.parts), str(path))):
            self._files.setdefault(bare(path.name), path)

    def find(self, *names: str) -> Path | None:
        """The first of the names that is there; a name may end in `.gz` or `.xz` or not."""
        for name in names:
            path = self._files.get(bare(name))
            if path is not None:
                if path not in self.used:
                    self.used.append(path)
                return path
        return None

    def pair(self, sources: Iterable[str], targets: Iterable[str]) -> tuple[Path, Path]:
        """The two files of a part; each is given the names that it may have, the released one first.

        Raises DataError that lists the names of what is missing.
        """
        sources, targets = list(sources), list(targets)
        found = [self.find(*sources), self.find(*targets)]
        missing = [names for names, path in zip((sources, targets), found, strict=True) if path is None]
        if missing or found[0] is None or found[1] is None:
            raise MissingFiles([" or ".join(names) for names in missing], self.folders)
        return found[0], found[1]


class MissingFiles(DataError):
    """Files of a corpus are not where they were looked for."""

    def __init__(self, names: list[str], folders: list[Path]) -> None:
        self.names = names
        self.folders = folders
        where = ", ".join(str(folder) for folder in folders) or "any folder"
        super().__init__(f"not found in {where}: {'; '.join(names)}")


def bare(name: str) -> str:
    """A file name without its packing."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name
