"""C++ sources of this package: compiled once on the machine they run on, kept in the cache, and loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.core import processor
from attnbench.core.files import cache_root
from attnbench.core.lock import making

SWITCH = "ATTNBENCH_NATIVE"
"""Environment variable; 0 leaves everything to torch."""

_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-shared")
_SILENT = ("-w", "-Wno-psabi")
_MACHINE = ("-march=native", "-mcpu=native")  # x86 knows the first, some others the second
_LOOPS = (("-fopenmp",), ("-fopenmp-simd",), ())
"""In threads and vectors; in vectors alone where a compiler has no threads, as clang++ often has not; as they are."""
_PATIENCE = 120
"""Seconds that one compilation may take."""

_PASSING = ("Killed", "out of memory", "No space left")
"""In what a compiler says: faults that may be gone another time, so that they are not remembered."""

_log = logging.getLogger(__name__)


_TRUE = (Tensor, nn.Parameter)
_functorch: Any = getattr(torch._C, "_functorch", None)  # torch has no public name for it
_wrapped: Callable[[Tensor], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", lambda _: False)

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


def loaded(source: Path) -> ctypes.CDLL:
    """The library whatever `off` says: for the backward pass of what it made."""
    library = _load(source)
    if library is None:
        raise RuntimeError(f"{source.name} was never compiled here")
    return library


@functools.cache
def _load(source: Path) -> ctypes.CDLL | None:
    name = engine()
    if name is None:
        _log.debug("%s is left to torch: no C++ compiler, or %s=0", source.stem, SWITCH)
        return None
    words = [*_texts(source), name.encode(), " ".join(_command() or ()).encode(), processor.identity()]
    key = hashlib.sha256(b"\0".join([*words, *(flag.encode() for flag in _FLAGS)])).hexdigest()[:16]
    target = cache_root() / "native" / f"{source.stem.strip('_')}-{key}.so"
    try:
        try:
            return ctypes.CDLL(str(_made(source, target)))
        except OSError:
            if target.is_file():  # a broken file, which the next process would meet again
                target.unlink()
                return ctypes.CDLL(str(_made(source, target)))
            return _for_this_process(source, target.name)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("%s is left to torch, it could not be compiled and loaded: %s", source.name, error)
        return None


def readable(*tensors: Tensor) -> bool:
    """Whether compiled code may read these where they lie: true tensors, not traced nor mapped over by torch.func, none
    a view that negates."""
    for each in tensors:
        if type(each) not in _TRUE or _wrapped(each) or each.is_neg():
            return False
    return not torch.compiler.is_compiling()


def at(tensor: Any) -> ctypes.c_void_p:
    """Where the numbers of a contiguous tensor lie; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def engine() -> str | None:
    """What compiles the sources, with its version; None where they are left to torch."""
    return None if os.environ.get(SWITCH) == "0" else compiler()


@functools.cache
def compiler() -> str | None:
    """The C++ compiler with its version, as it says it; None where there is none. `$CXX` goes before others."""
    command = _command()
    if command is None:
        return None
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.partition("\n")[0].strip()


def _texts(source: Path) -> list[bytes]:
    """The source, and what it includes of this package."""
    text = source.read_bytes()
    included = re.findall(rb'^#include "([^"]+)"', text, re.MULTILINE)
    return [text, *(each for name in included for each in _texts(source.parent / name.decode()))]


def _command() -> list[str] | None:
    named = os.environ.get("CXX", "").split()
    if named:
        return named
    return next(([name] for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def _made(source: Path, target: Path) -> Path:
    """The compiled file. What the compiler refused once it is not asked for again: the reason stands beside."""
    if target.is_file():
        return target
    with making(target):
        refused = target.with_suffix(".refused")
        if refused.is_file():
            raise subprocess.SubprocessError(refused.read_text(encoding="utf-8"))
        if not target.is_file():
            _log.info("compiling %s for this processor, once", source.name)
            try:
                _compile(source, target)
            except subprocess.CalledProcessError as error:
                if not any(word in error.stderr for word in _PASSING):
                    refused.write_text(error.stderr, encoding="utf-8")
                raise subprocess.SubprocessError(error.stderr) from None
    return target


def _for_this_process(source: Path, name: str) -> ctypes.CDLL:
    """Where nothing can be written to the cache."""
    with tempfile.TemporaryDirectory(prefix="attnbench-") as folder:
        target = Path(folder) / name
        try:
            _compile(source, target)
        except subprocess.CalledProcessError as error:
            raise subprocess.SubprocessError(error.stderr) from None
        return ctypes.CDLL(str(target))


def _compile(source: Path, target: Path) -> None:
    """Raises CalledProcessError with what the compiler said of the source, or of the first way."""
    half = target.with_suffix(f".{os.getpid()}")
    said: list[str] = []
    try:
        for machine in _MACHINE:
            for loops in _LOOPS:
                command = [*(_command() or ()), *_FLAGS, *_SILENT, machine, *loops, str(source), "-o", str(half)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
                if done.returncode == 0:
                    os.replace(half, target)
                    return
                said.append(done.stderr.strip()[:500])
    finally:
        half.unlink(missing_ok=True)  # what a compiler that was stopped had written
    own = (
        words for words in said if source.name in words
    )  # the others speak of options, which not every compiler knows
    raise subprocess.CalledProcessError(1, str(source), stderr=next(own, said[0]))
