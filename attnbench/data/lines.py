"""Lines of text files as they are released: plain, gzip or xz, UTF-8, one sentence a line, read as a stream."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from attnbench.core.errors import DataError

SUFFIXES = (".gz", ".xz")
_MAGIC: dict[str, tuple[bytes, Callable[[Any], Any]]] = {
    ".gz": (b"\x1f\x8b", gzip.open),
    ".xz": (b"\xfd7zXZ\x00", lzma.open),
}
_PACKED = {b"BZh91AY&SY": "bzip2", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf": "7-zip"}
"""How archives begin that are not read."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """number: 1-based, as an editor shows it."""

    number: int
    text: str


def open_bytes(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked if it is packed (told by its first bytes, not by its name).

    Raises DataError if the file is absent, or is named .gz or .xz and is not.
    """
    try:
        file = path.open("rb")
        head = file.peek(8)  # and not read: a pipe gives each byte once
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    for magic, opener in _MAGIC.values():
        if head.startswith(magic):
            if not path.is_file():
                return opener(file)
            file.close()  # what an opener opens itself it closes
            return opener(path)
    if path.suffix in _MAGIC and head:
        file.close()
        raise DataError(f"{path}: is named {path.suffix} but is not such a file; fetch it again, or rename it")
    return file


def read_lines(path: Path) -> Iterator[Line]:
    """Each line of a text file, without its end (LF or CR LF) and without a byte order mark.

    Only LF ends a line: U+2028, form feeds and the like stay inside it.
    Raises DataError that names file, line and mend: bad UTF-8, NUL, UTF-16, a damaged archive, an absent file.
    """
    with open_bytes(path) as file:
        yield from lines_of(file, path)


def lines_of(file: IO[bytes], path: Path) -> Iterator[Line]:
    """The same of an open file; path: how errors call it."""
    number = returns = 0
    try:
        for number, data in enumerate(file, 1):
            returns = data.count(b"\r")
            if number == 1:
                if packer := next((name for magic, name in _PACKED.items() if data.startswith(magic)), None):
                    raise DataError(f"{path}: is packed by {packer}; unpack it, or pack it by gzip or xz")
                if data.startswith(_UTF16):
                    raise DataError(f"{path}: is UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
                data = data.removeprefix(_BOM)
            yield Line(number, _decode(data, path, number))
        if number == 1 and returns > 1:
            raise DataError(f"{path}: its lines end in CR alone, so that all of it is one: tr '\\r' '\\n' < FILE > NEW")
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: damaged after line {number} ({error}); fetch or copy it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read after line {number} ({error.strerror or error})") from None


def _decode(data: bytes, path: Path, number: int) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{number}: not UTF-8 at byte {error.start + 1} of the line (0x{data[error.start]:02x}); "
            "convert the file (iconv -f LATIN1 -t UTF-8) or repair that line"
        ) from None
    if "\x00" in text:
        raise DataError(f"{path}:{number}: holds a NUL character; is this a text file? Remove it or convert the file")
    return text.rstrip("\n").removesuffix("\r")
