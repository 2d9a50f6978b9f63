"""Fetches released files into the cache: mirrors in turn, checksums, no half a file, progress in the log."""

from __future__ import annotations

import gzip
import hashlib
import logging
import lzma
import re
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pooch

from attnbench.core.errors import DataError
from attnbench.core.files import write_atomic
from attnbench.core.lock import making
from attnbench.data.archives import damage, is_archive
from attnbench.data.datasets.base import Remote
from attnbench.data.lines import open_bytes

log = logging.getLogger("attnbench")

ATTEMPTS = 2
PAUSE = 1.0
_TIMEOUT = 30
_PIECE = 1 << 20
_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:html|!doctype\s+html)\b", re.IGNORECASE)


class Unavailable(DataError):
    """No mirror gave the file. tried: (URL, what went wrong) of each."""

    def __init__(self, remote: Remote, tried: list[tuple[str, str]]) -> None:
        self.remote = remote
        self.tried = tried
        super().__init__("\n".join([f"{remote.name} cannot be had:", *(f"  {url}: {why}" for url, why in tried)]))


class Fetched(NamedTuple):
    """A file in the cache and the URL it came from."""

    path: Path
    url: str
    sha256: str


def fetch(remote: Remote, cache: Path, *, offline: bool = False) -> Fetched:
    """The file in `cache`/downloads, fetched unless it is there. Raises Unavailable.

    A checksum is verified before the file takes its name. Where none is known, the one seen first is recorded beside
    the file, with a warning, and holds from then on.
    """
    tried = []
    for url in remote.urls:
        folder = cache / "downloads" / hashlib.sha256(url.encode()).hexdigest()[:16]
        try:
            return _fetch(remote, url, folder, offline)
        except _Failed as error:
            tried.append((url, str(error)))
    raise Unavailable(remote, tried)


class _Failed(Exception):
    """One URL did not do."""


def _fetch(remote: Remote, url: str, folder: Path, offline: bool) -> Fetched:
    path, seen = folder / remote.name, folder / f"{remote.name}.sha256"
    known = remote.checksum
    recorded = known is None and seen.exists()
    if recorded:
        known = "sha256:" + seen.read_text(encoding="utf-8").strip()

    def present() -> bool:
        return path.exists() and (known is None or matches(path, known))

    if not present():
        if offline:
            raise _Failed("offline, and not in the cache")
        with making(path):
            for left in folder.glob("tmp????????"):  # by a killed process: the lock says that none is at work
                left.unlink()
            if not present():
                mend = f"; {seen} is of the file seen first: delete it to take this one" if recorded else ""
                _download(remote, url, folder, known, mend)
    if known is None:
        _require_whole(path)
    sha256 = _hash(path, "sha256")
    if known is None:
        if remote.size is not None and path.stat().st_size != remote.size:
            size = path.stat().st_size
            path.unlink()
            raise _Failed(f"wrong size: {size:,} bytes in place of {remote.size:,}")
        log.warning("%s: no checksum is known; recorded the one seen: sha256:%s", remote.name, sha256)
        write_atomic(seen, sha256 + "\n")
    return Fetched(path, url, sha256)


def _require_whole(path: Path) -> None:
    """A server may answer with a page that says why there is no such file, or end before its end."""
    with path.open("rb") as file:
        begins = file.read(1024)
    if is_archive(path.name):
        fault = damage(path)
        said = fault and f"is no whole archive ({fault})"
    elif _PAGE.match(begins):
        said = "is a page of a website"
    else:
        said = _unreadable(path)
    if said is not None:
        path.unlink()
        raise _Failed(f"what it sent {said}; it begins with {begins[:24]!r}")


def _unreadable(path: Path) -> str | None:
    """What is wrong with a file that is read as it is; one that is packed has a checksum at its end."""
    try:
        with open_bytes(path) as file:
            while file.read(_PIECE):
                pass
    except (DataError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        return f"cannot be unpacked ({_short(error)})"
    return None


def _download(remote: Remote, url: str, folder: Path, known: str | None, mend: str) -> None:
    import requests

    logging.getLogger("pooch").setLevel(logging.WARNING)
    pooch.get_logger().setLevel(logging.WARNING)
    for attempt in range(1, ATTEMPTS + 1):
        progress: Any = Progress(remote.name)
        downloader: Any = pooch.HTTPDownloader(progressbar=progress, chunk_size=1 << 16, timeout=_TIMEOUT)
        try:
            pooch.retrieve(url, known, fname=remote.name, path=folder, downloader=downloader)
            return
        except requests.HTTPError as error:
            status = error.response.status_code if error.response is not None else error
            raise _Failed(f"the server answers {status}") from None
        except requests.RequestException as error:
            if attempt == ATTEMPTS:
                raise _Failed(_short(error)) from None
            time.sleep(PAUSE)
        except ValueError as error:  # pooch's word for a checksum that does not match
            raise _Failed(f"wrong checksum: {_short(error)}{mend}") from None


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 240 else text[:237] + "..."


def matches(path: Path, checksum: str) -> bool:
    """Whether a file has a checksum, `sha256:...` or of another algorithm."""
    algorithm, _, value = checksum.rpartition(":")
    return _hash(path, algorithm) == value


def _hash(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


class Progress:
    """One log line every 10% or 30 s; pooch feeds it."""

    def __init__(self, name: str) -> None:
        self.total = 0
        self._name = name
        self._done = 0
        self._told = 0.0
        self._when = time.monotonic()

    def update(self, size: int) -> None:
        self._done += size
        share = self._done / self.total if self.total else 0.0
        if share - self._told > 0.0999 or time.monotonic() - self._when >= 30:
            self._told, self._when = share, time.monotonic()
            done = f"{min(self._done, self.total or self._done) / 1e6:.1f} MB"
            log.info("%s: %s%s", self._name, done, f" ({min(share, 1):.0%})" if self.total else "")

    def reset(self) -> None:
        self._done = 0

    def close(self) -> Any:
        """Pooch calls it at the end."""
