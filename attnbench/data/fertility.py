"""How many target tokens each source token of a corpus is aligned to, kept beside the prepared data."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from attnbench.core.errors import DataError
from attnbench.core.files import folder_atomic, write_json
from attnbench.core.lock import making
from attnbench.data.alignment.fertility import fertilities
from attnbench.data.alignment.links import words
from attnbench.data.alignment.model import Aligner
from attnbench.data.corpus import Data
from attnbench.data.datasets.base import SPLITS
from attnbench.data.prepare import file_facts, files_fault, prepared_anew, require_same
from attnbench.data.store import IdLists, IdsWriter

log = logging.getLogger("attnbench")

SINK = "<sink>"
"""Stands for EOS: what no source token explains may be aligned to it."""
VERSION = 1
"""Part of the names under which results are kept: another number where the aligner gives other links."""
_BLOCK = 4096
_FILES = "files.json"


def with_fertilities(data: Data) -> Data:
    """The same data, whose batches have fertilities: of forward alignments between tokens as the model sees them, EOS
    being the sink (Malaviya et al. 2018). The aligner learns from the training split. Made once, then kept. Raises
    DataError where the folder was prepared anew since the data were opened."""
    folder = data.path / f"fertility-{VERSION}"
    require_same(data.path, data.manifest)
    make_once(folder, lambda: _write_fertilities(data, folder), lambda: _is_whole(data, folder))
    return data.with_fertilities(folder)


def _is_whole(data: Data, folder: Path) -> bool:
    """Whether the files are there as they were written, and are of these data."""
    if not folder.exists():
        return False
    fault: str | None = f"{folder}: damaged"
    with suppress(FileNotFoundError, ValueError, AttributeError, TypeError):
        fault = _fault(data, folder)
    if fault is not None:
        log.warning("%s; aligning again", fault)
    return fault is None


def _fault(data: Data, folder: Path) -> str | None:
    noted = folder / _FILES
    if noted.exists():  # an earlier version noted nothing
        facts: Any = json.loads(noted.read_text(encoding="utf-8"))
        fault = files_fault(folder, facts) if facts else f"{noted}: damaged"
        if fault is not None:
            return fault
    for split in SPLITS:
        path = folder / f"{split}.ids"
        if not np.array_equal(IdLists(path, 1).offsets, data.split(split).ids.source.offsets):
            return f"{path}: is of other data"
    return None


def make_once(path: Path, make: Callable[[], object], there: Callable[[], bool] | None = None) -> None:
    """Make `path`, beside the prepared data, unless it is there; of processes that want it at once, one does. Raises
    DataError where it is not there and nothing can be written, or where the data go meanwhile.

    make: calls require_same before it puts in place what it made, which may be of data that were opened before.
    there: says whether it is; left out: whether something has its name.
    """
    there = there or path.exists
    if there():  # what is complete may stand where nothing can be written
        return
    try:
        with making(path):
            if not there():
                make()
    except FileNotFoundError as error:  # a new preparation takes the old folder away, and what is half made in it
        raise prepared_anew(path.parent) from error
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: {error.strerror or error}; alignments are kept beside the prepared data: make "
            "that folder writable, or set ATTNBENCH_CACHE to one that is"
        ) from error


def _write_fertilities(data: Data, folder: Path) -> None:
    log.info("aligning %s pairs for their fertilities", f"{len(data.split('train')):,}")
    sides = {split: _as_words(data, split) for split in SPLITS}
    aligner = Aligner.train(*sides["train"], directions=("forward",))
    with folder_atomic(folder) as work:
        for split, (source, target) in sides.items():
            with IdsWriter(work / f"{split}.ids", rows=1) as writer:
                for first in range(0, len(source), _BLOCK):
                    given = source[first : first + _BLOCK]
                    links = aligner.align(given, target[first : first + _BLOCK], "forward")
                    counts = fertilities(links, [len(words(line)) for line in given])
                    writer.write([count[:-1].tolist() for count in counts])
        write_json(work / _FILES, {file.name: file_facts(file) for file in sorted(work.iterdir())})
        require_same(data.path, data.manifest)


def _as_words(data: Data, split: str) -> tuple[list[str], list[str]]:
    """Lines of ids, the source's with the sink at the end."""
    ids = data.split(split).ids
    return with_sink(_lines(ids.source)), _lines(ids.target)


def _lines(lists: IdLists) -> list[str]:
    return [" ".join(map(str, lists[number].tolist())) for number in range(len(lists))]


def word_aligner(data: Data, *, lowercase: bool) -> Aligner:
    """An aligner of the words of a corpus, tokenised and not in pieces, that its training split has taught. Made once.

    Source lines end with SINK, here and where it is asked. Raises DataError as with_fertilities does.
    """
    path = data.path / f"aligner-{VERSION}{'-lc' if lowercase else ''}.npz"
    found: list[Aligner] = []

    def there() -> bool:
        with suppress(DataError):  # absent, or damaged
            found.append(Aligner.load(path))
        return bool(found)

    def learn() -> None:
        if path.exists():
            log.warning("%s: cannot be read; learning it again", path)
        train = data.split("train")
        log.info("aligning %s pairs for the DROP-score", f"{len(train):,}")
        found.append(Aligner.train(with_sink(train.source), list(train.target), lowercase=lowercase))
        require_same(data.path, data.manifest)
        found[0].save(path)

    require_same(data.path, data.manifest)
    make_once(path, learn, there)
    return found[0]


def with_sink(lines: Iterable[str]) -> list[str]:
    """The lines with the sink behind."""
    return [f"{line} {SINK}".lstrip(" ") for line in lines]
