"""Prepared splits on disk: lines of text and lists of ids, each with a table of offsets, memory-mapped when read.

`NAME.txt` + `NAME.txt.idx`: UTF-8 lines and where each begins. `NAME.ids` + `NAME.idx`: lists of ids, the same way.
Offsets are little-endian uint64, one more than there are rows; ids are uint16, or uint32 if a vocabulary needs it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

_OFFSET = np.dtype("<u8")
_BUFFER = 1 << 16
_BLOCK = 1 << 12
_VISIT = 256
"""Rows read before pages are given back; the system maps up to 64 kB around each."""


class _Offsets:
    """Writes a table of offsets as it grows."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._pending = [0]
        self.total = 0
        self.rows = 0

    def add(self, size: int) -> None:
        self.total += size
        self.rows += 1
        self._pending.append(self.total)
        if len(self._pending) >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        self._file.write(np.array(self._pending, _OFFSET).tobytes())
        self._pending = []

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._file.close()


class _Writer:
    """A file of rows and that of their offsets, closed together. A context manager."""

    def __init__(self, path: Path, offsets: Path) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._offsets = _Offsets(offsets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._file.close()
        finally:
            self._offsets.close()


class TextWriter(_Writer):
    """Writes lines to `path` and their offsets to `path`.idx."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path.with_name(path.name + ".idx"))

    def write(self, line: str) -> None:
        data = line.encode() + b"\n"
        self._file.write(data)
        self._offsets.add(len(data))

    @property
    def rows(self) -> int:
        return self._offsets.rows


class IdsWriter(_Writer):
    """Writes lists of ids to `path` (NAME.ids) and their offsets to NAME.idx.

    rows: size of the vocabulary; up to 65,536 the ids take two bytes each, else four.
    """

    def __init__(self, path: Path, rows: int) -> None:
        super().__init__(path, path.with_suffix(".idx"))
        self._dtype = ids_dtype(rows)

    def write(self, rows: Sequence[Sequence[int]]) -> None:
        """Append lists of ids. Raises OverflowError for an id that the type cannot hold."""
        self._file.write(np.fromiter(chain.from_iterable(rows), self._dtype).tobytes())
        for row in rows:
            self._offsets.add(len(row))


def ids_dtype(rows: int) -> np.dtype[Any]:
    """The type that ids of a vocabulary of `rows` entries are stored in."""
    return np.dtype("<u2") if rows <= 1 << 16 else np.dtype("<u4")


class _Mapped:
    """A file as a read-only array; `release` gives its pages back, so that reading all of it stays small."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._map: mmap.mmap | None = None
        if path.stat().st_size == 0:
            self.array: NDArray[Any] = np.empty(0, dtype)
            return
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array = np.frombuffer(self._map, dtype)

    def release(self) -> None:
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class TextLines(Sequence[str]):
    """The lines of a `TextWriter`, by index, without reading the file."""

    def __init__(self, path: Path) -> None:
        self._text = _Mapped(path, np.dtype("u1"))
        self._offsets = _Mapped(path.with_name(path.name + ".idx"), _OFFSET)

    def __len__(self) -> int:
        return len(self._offsets.array) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"line {index} of {len(self)}")
        first, end = self._offsets.array[index : index + 2]
        return self._text.array[int(first) : int(end) - 1].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _BLOCK):
            offsets = self._offsets.array[start : start + _BLOCK + 1]
            block = self._text.array[int(offsets[0]) : int(offsets[-1])].tobytes().decode()
            self.release()
            yield from block.split("\n")[:-1]

    def release(self) -> None:
        self._text.release()
        self._offsets.release()


class Gathered(NamedTuple):
    """Some rows: row i is ids[first[i] : first[i] + lengths[i]]."""

    ids: NDArray[np.int64]
    first: NDArray[np.int64]
    lengths: NDArray[np.int64]


class IdLists:
    """The rows of an `IdsWriter`."""

    def __init__(self, path: Path, rows: int) -> None:
        self._ids = _Mapped(path, ids_dtype(rows))
        self._offsets = _Mapped(path.with_suffix(".idx"), _OFFSET)

    def __len__(self) -> int:
        return len(self._offsets.array) - 1

    @property
    def offsets(self) -> NDArray[np.uint64]:
        """Where each row begins, and where the last one ends."""
        return self._offsets.array

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        first, end = self._offsets.array[index : index + 2]
        return self._ids.array[int(first) : int(end)].astype(np.int64)

    def gather(self, index: NDArray[np.int64]) -> Gathered:
        """The named rows, copied out of the file.

        They are visited in the file's order, and pages are given back on the way: a few rows from all over a large file
        would otherwise hold most of it.
        """
        order = np.argsort(index, kind="stable")
        first, lengths = np.empty_like(index), np.empty_like(index)
        parts: list[NDArray[np.int64]] = []
        total = 0
        for start in range(0, len(order), _VISIT):
            places = order[start : start + _VISIT]
            offsets = self._offsets.array
            begins = offsets[index[places]].astype(np.int64)
            lengths[places] = offsets[index[places] + 1].astype(np.int64) - begins
            ends = np.cumsum(lengths[places])
            first[places] = total + ends - lengths[places]
            where = np.arange(ends[-1]) + np.repeat(begins - (ends - lengths[places]), lengths[places])
            parts.append(self._ids.array[where].astype(np.int64))
            total += int(ends[-1])
            self.release()
        return Gathered(np.concatenate(parts) if parts else np.empty(0, np.int64), first, lengths)

    def release(self) -> None:
        """Give the pages read so far back to the system; they are read again when needed."""
        self._ids.release()
        self._offsets.release()
