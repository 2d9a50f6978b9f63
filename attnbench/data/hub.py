"""The last resort: a corpus from the Hugging Face hub, by the packaged parquet reader (no script is ever run)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attnbench.core.errors import DataError
from attnbench.core.files import folder_atomic, sweep
from attnbench.core.lock import making


class Hub(NamedTuple):
    """A copy on the hub. files: the parquet files of each split, `hf://datasets/...`. note: in what it differs."""

    files: Mapping[str, str]
    note: str = ""


def from_hub(hub: Hub, languages: tuple[str, str], folder: Path) -> Path:
    """`folder` with SPLIT.LANGUAGE for each split and language, made now unless it is there, by one process at a time.

    Raises DataError when the hub cannot be reached or holds something else.
    """
    if folder.exists():
        return folder
    with making(folder):
        if folder.exists():  # another process was first
            return folder
        sweep(folder.parent, folder.name)
        try:
            import datasets

            loaded: Any = datasets.load_dataset("parquet", data_files=dict(hub.files), streaming=True)
            with folder_atomic(folder) as work:
                for split in hub.files:
                    _write(loaded[split], [work / f"{split}.{language}" for language in languages], languages)
        except DataError:
            raise
        except Exception as error:  # whatever the hub's client raises, the user needs the same advice
            raise DataError(" ".join(str(error).split())[:240] or type(error).__name__) from error
    return folder


def _write(rows: Iterable[Mapping[str, Any]], paths: list[Path], languages: tuple[str, str]) -> None:
    with (
        paths[0].open("w", encoding="utf-8", newline="\n") as source,
        paths[1].open("w", encoding="utf-8", newline="\n") as target,
    ):
        for row in rows:
            pair = row.get("translation", row)
            if any(language not in pair for language in languages):
                raise DataError(f"the hub's rows hold {', '.join(pair)}, not {' and '.join(languages)}")
            for file, language in zip((source, target), languages, strict=True):
                file.write(" ".join((pair[language] or "").split()) + "\n")
