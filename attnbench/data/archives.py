"""Unpacks released archives, safely and once."""

from __future__ import annotations

import hashlib
import lzma
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from attnbench.core.errors import DataError
from attnbench.core.files import folder_atomic

ARCHIVES = (".tgz", ".tar.gz", ".tar.xz", ".tar", ".zip")


def is_archive(name: str) -> bool:
    return name.endswith(ARCHIVES)


def unpack(path: Path, into: Path) -> Path:
    """The folder that holds the contents of an archive, unpacked unless it is there.

    Members that would land outside the folder are refused. Raises DataError for a damaged or unsafe archive.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    folder = into / f"{path.name}-{digest}"
    if folder.exists():
        return folder
    try:
        with folder_atomic(folder) as work:
            if path.name.endswith(".zip"):
                _unzip(path, work)
            else:
                _untar(path, work)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: damaged or unsafe archive ({error}); delete it and fetch it again") from None
    return folder


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
