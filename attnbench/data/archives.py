"""Unpacks released archives, safely and once."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

from attnbench.core.errors import DataError
from attnbench.core.files import folder_atomic
from attnbench.core.lock import making

ARCHIVES = (".tgz", ".tar.gz", ".tar.xz", ".tar", ".zip")
_PIECE = 1 << 20
_END = 512
"""Zeros that end a tar file, at least: some writers leave out the second block of them."""
_DAMAGE = (
    tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError,
    RuntimeError, NotImplementedError,  # the last two of a zip with a password, or packed in an unknown way
)  # fmt: skip


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
        for stale in into.glob(f".{folder.name}.*"):  # of a killed process: the lock says that none is at work
            shutil.rmtree(stale, ignore_errors=True)
        require_whole(path)
        try:
            with folder_atomic(folder) as work:
                if path.name.endswith(".zip"):
                    _unzip(path, work)
                else:
                    _untar(path, work)
        except _DAMAGE as error:
            raise _damaged(path, error) from None
    return folder


def require_whole(path: Path) -> None:
    """Raise DataError for a file that is no archive, or whose checksum, which stands at its end, is not that of its
    content: tarfile reads no further than the last member, and takes one that it cannot read for the end."""
    try:
        if path.name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                spoilt = archive.testzip()
            if spoilt is not None:
                raise zipfile.BadZipFile(f"member '{spoilt}' is spoilt")
            return
        end = b""
        with _opened(path) as stream:
            while piece := stream.read(_PIECE):
                end = (end + piece)[-_END:]
        if end.strip(b"\0") or len(end) < _END:
            raise tarfile.TarError("it is no tar file, or lacks its end")
    except _DAMAGE as error:
        raise _damaged(path, error) from None


def _opened(path: Path) -> gzip.GzipFile | IO[bytes]:
    if path.name.endswith((".tgz", ".gz")):
        return gzip.GzipFile(path)
    return lzma.open(path) if path.name.endswith(".xz") else path.open("rb")


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: damaged or unsafe archive ({' '.join(str(error).split())}); delete it and fetch it again"
    )


def _untar(path: Path, folder: Path) -> None:
    with tarfile.open(path) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
            return
        for member in archive:  # Python before 3.11.4, as Debian 12 has it, cannot tell which links are safe
            name = PurePosixPath(member.name)
            if not (member.isfile() or member.isdir()) or name.is_absolute() or ".." in name.parts:
                raise tarfile.TarError(f"member '{member.name}' is a link, or lies outside the archive")
            archive.extract(member, folder, set_attrs=False)


def _unzip(path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise zipfile.BadZipFile(f"member '{name}' lies outside the archive")
        archive.extractall(folder)
