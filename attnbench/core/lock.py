"""One process at a time: a lock file that the system frees when its holder dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_PATIENCE = 0.2
"""Seconds in which a holder may turn out to be a mere look by is_locked."""

_SILENCE = 20.0
"""Seconds of waiting until it is told."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""What file systems without locks answer: Lustre as it is often mounted, NFS without its daemon."""

_log = logging.getLogger(__name__)


class LockedError(Exception):
    """Another process holds the lock; the message says which."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path` for the length of the block. Raises LockedError when another process holds it, OSError where the file
    system keeps no locks (some of clusters): two processes would spoil one another's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    patience = time.monotonic() + _PATIENCE
    while True:
        file = path.open("a+")
        try:
            _flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            if time.monotonic() < patience:
                time.sleep(_PATIENCE / 20)
                continue
            raise LockedError(f"{path} is held by {holder or 'another process'}") from None
        except OSError:
            file.close()
            raise
        if _is(file.fileno(), path):
            break
        file.close()  # the last holder removed the file between our open and our lock
    try:
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}))
        file.flush()
        yield
    finally:
        if _is(file.fileno(), path):  # and not another's, where somebody has removed ours
            with suppress(FileNotFoundError):
                path.unlink()
        file.close()


@contextmanager
def making(path: Path) -> Iterator[None]:
    """One process at a time makes `path`; the others wait, and find it there. Who waits long says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f"{path.name}.lock").open("w") as lock:
        patience = time.monotonic() + _SILENCE
        while not _taken(lock) and time.monotonic() < patience:
            time.sleep(_SILENCE / 1000)
        if not _taken(lock):
            _log.warning("waiting for %s, which another process makes; if that one was stopped, end it", path)
            _flock(lock, fcntl.LOCK_EX)
        yield


def _taken(lock: IO[str]) -> bool:
    try:
        _flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """True while a living process holds the lock, False on a file system that keeps none."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOENT, *NO_LOCKS):
            return False
        raise


def _flock(file: IO[str], operation: int) -> None:
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        said = "this file system keeps no locks; name a folder on another disk (--runs, ATTNBENCH_CACHE)"
        raise OSError(error.errno, said, file.name) from None


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
