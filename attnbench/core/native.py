"""C++ sources of this package: compiled once on the machine they run on, kept in the cache, and loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from attnbench.core.files import cache_root
from attnbench.core.lock import making

SWITCH = "ATTNBENCH_NATIVE"
"""Environment variable; 0 leaves everything to torch."""

_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-shared")
_SILENT = ("-w", "-Wno-psabi")
_MACHINE = ("-march=native", "-mcpu=native")  # x86 knows the first, some others the second
_PATIENCE = 120
"""Seconds that one compilation may take."""

_log = logging.getLogger(__name__)


_off = ContextVar("_off", default=False)


@contextmanager
def off() -> Iterator[None]:
    """Everything in the block is left to torch: the definition, and what compiled code is measured against."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def load(source: Path) -> ctypes.CDLL | None:
    """The library made of one C++ source; None without a compiler that can make it, and where it is switched off.

    Compiled anew when the source, the compiler or the processor is another one. A failure is logged, never raised.
    """
    return None if _off.get() else _load(source)


@functools.cache
def _load(source: Path) -> ctypes.CDLL | None:
    if os.environ.get(SWITCH) == "0":
        return None
    name = compiler()
    if name is None:
        _log.debug("no C++ compiler: %s is left to torch", source.stem)
        return None
    key = hashlib.sha256(
        b"\0".join([*_texts(source), name.encode(), _processor(), *(flag.encode() for flag in _FLAGS)])
    )
    target = f"{source.stem.strip('_')}-{key.hexdigest()[:16]}.so"
    try:
        return ctypes.CDLL(str(_made(source, cache_root() / "native" / target)))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s could not be compiled, and is left to torch: %s", source.name, error)
        return None


def at(tensor: Any) -> ctypes.c_void_p:
    """Where the numbers of a contiguous tensor lie; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@functools.cache
def compiler() -> str | None:
    """The C++ compiler with its version, as it says it; None where there is none. `$CXX` goes before others."""
    command = _command()
    if command is None:
        return None
    try:
        said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.partition("\n")[0].strip()


def _texts(source: Path) -> list[bytes]:
    """The source, and what it includes of this package."""
    text = source.read_bytes()
    included = re.findall(rb'^#include "([^"]+)"', text, re.MULTILINE)
    return [text, *(each for name in included for each in _texts(source.parent / name.decode()))]


def _command() -> str | None:
    named = os.environ.get("CXX", "").split()
    return next(filter(None, map(shutil.which, [*named[:1], "g++", "c++", "clang++"])), None)


def _made(source: Path, target: Path) -> Path:
    """The compiled file, in the cache or, where nothing can be written there, in a folder for this process."""
    if target.is_file():
        return target
    try:
        with making(target):
            if not target.is_file():
                _compile(source, target)
    except OSError:
        target = Path(tempfile.mkdtemp(prefix="attnbench-")) / target.name
        _compile(source, target)
    return target


def _compile(source: Path, target: Path) -> None:
    """Raises SubprocessError with what the compiler said last."""
    half = target.with_suffix(f".{os.getpid()}")
    said = ""
    for machine in _MACHINE:
        for threads in (("-fopenmp",), ()):  # without, loops run in one thread
            command = [str(_command()), *_FLAGS, *_SILENT, machine, *threads, str(source), "-o", str(half)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
            if done.returncode == 0:
                os.replace(half, target)
                return
            said = done.stderr.strip()
    raise subprocess.SubprocessError(said[-500:])


def _processor() -> bytes:
    """What the compiled code depends on: a cache may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith((b"model name", b"flags", b"Features"))]
    return b"\0".join([platform.machine().encode(), platform.processor().encode(), *flags[:2]])
