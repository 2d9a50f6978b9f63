"""Files that a spec names by path: found in the user's folder first, then in the working directory."""

from __future__ import annotations

from pathlib import Path

from attnbench.core.errors import DataError
from attnbench.data.finder import Finder


def _places(name: str, folders: list[Path]) -> list[Path]:
    path = Path(name).expanduser()
    return [path] if path.is_absolute() else [*(folder / path for folder in folders), Path.cwd() / path]


def present_or_first(name: str, folders: list[Path]) -> Path:
    """Where the file is, or the first place where it might have been."""
    places = _places(name, folders)
    return next(filter(Path.is_file, places), places[0])


def existing(name: str, files: Finder) -> Path:
    """Raises DataError where it is in none of the places."""
    path = present_or_first(name, files.folders)
    if path.is_file():
        return path
    tried = " or ".join(str(place) for place in _places(name, files.folders))
    raise DataError(f"no file {tried}; correct the path in task.dataset, or name its folder: --from DIR")
