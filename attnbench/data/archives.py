"""Unpacks released archives, safely and once."""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from attnbench.core.errors import DataError
from attnbench.core.files import folder_atomic, sweep
from attnbench.core.lock import making

ARCHIVES = (".tgz", ".tar.gz", ".tar.xz", ".tar", ".zip")
_PIECE = 1 << 20
_PACKINGS: tuple[tuple[bytes, Callable[[], Any]], ...] = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(31)),
    (b"\xfd7zXZ\0", lzma.LZMADecompressor),
    (b"BZh", bz2.BZ2Decompressor),
)
"""How what is packed begins, and what unpacks it and looks at its checksum: names say less, a server may have unpacked
what it sends, or a browser what it keeps."""
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, RuntimeError)
"""The last one of a zip with a password, or packed in an unknown way."""


def is_archive(name: str) -> bool:
    return name.endswith(ARCHIVES)


def unpack(path: Path, into: Path) -> Path:
    """The folder that holds the contents of an archive, unpacked unless it is there, by one process at a time.

    Members that would land outside the folder are refused. Raises DataError for a damaged or unsafe archive.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    folder = into / f"{path.name}-{digest}"
    if folder.exists():
        return folder
    with making(folder):
        if folder.exists():  # another process was first
            return folder
        sweep(into, folder.name)
        try:
            with folder_atomic(folder) as work:
                if path.name.endswith(".zip"):
                    _require_zip(path)
                    _unzip(path, work)
                else:
                    _require_sums(path)
                    _untar(path, work)
        except _DAMAGE as error:
            raise DataError(
                f"{path}: damaged or unsafe archive ({_said(error)}); delete it and fetch it again"
            ) from None
    return folder


def damage(path: Path) -> str | None:
    """What is wrong with a file that should be an archive, whole to its end."""
    try:
        if path.name.endswith(".zip"):
            _require_zip(path)
            return None
        _require_sums(path)
        with tarfile.open(path) as archive:
            for _ in archive:
                pass
            _require_end(archive)
    except _DAMAGE as error:
        return _said(error)
    return None


def _said(error: Exception) -> str:
    return " ".join(str(error).split())


def _require_sums(path: Path) -> None:
    """Read what is packed to its end, where its checksum stands, which tarfile does not look at. What lies behind that
    is left alone, as other tools do."""
    with path.open("rb") as file:
        rest = file.read(_PIECE)
        while make := next((make for begins, make in _PACKINGS if rest.startswith(begins)), None):
            stream = make()
            while True:
                try:
                    stream.decompress(rest)
                except OSError as error:  # bz2's word for it
                    raise EOFError(str(error)) from None
                if stream.eof:
                    break
                rest = file.read(_PIECE)
                if not rest:
                    raise EOFError("it ends before its end")
            rest = stream.unused_data.lstrip(b"\0")
            while len(rest) < 8 and (more := file.read(_PIECE)):
                rest = (rest + more).lstrip(b"\0")


def _require_end(archive: tarfile.TarFile) -> None:
    """That what ended the archive is a block of zeros: tarfile takes a member that it cannot read for the end."""
    stream: Any = archive.fileobj
    stream.seek(archive.offset)
    if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.ReadError(f"the member at byte {archive.offset:,} cannot be read")
    stream.seek(archive.offset)
    if not stream.read(1) and isinstance(stream, io.BufferedReader):  # packed ones have a checksum that held
        raise tarfile.ReadError("it lacks its end")


def _require_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            spoilt = archive.testzip()
    except (ValueError, OSError) as error:  # of names and places that are spoilt
        raise zipfile.BadZipFile(_said(error)) from None
    if spoilt is not None:
        raise zipfile.BadZipFile(f"member '{spoilt}' is spoilt")


def _untar(path: Path, folder: Path) -> None:
    with tarfile.open(path) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
            _require_end(archive)
            return
        for member in archive:  # Python before 3.11.4, as Debian 12 has it, cannot tell which links are safe
            name = PurePosixPath(member.name)
            if not (member.isfile() or member.isdir()) or name.is_absolute() or ".." in name.parts:
                raise tarfile.TarError(f"member '{member.name}' is a link, or lies outside the archive")
            archive.extract(member, folder, set_attrs=False)
        _require_end(archive)


def _unzip(path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise zipfile.BadZipFile(f"member '{name}' lies outside the archive")
        archive.extractall(folder)
