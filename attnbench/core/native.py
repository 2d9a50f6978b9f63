"""C++ sources of this package: compiled once on the machine they run on, kept in the cache, and loaded."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.core import processor
from attnbench.core.errors import AttnbenchError
from attnbench.core.files import cache_root, sync
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

_NO_ROOM = ("No space left", "quota exceeded")
_PASSING = (
    *_NO_ROOM, "Killed", "out of memory", "memory exhausted", "Cannot allocate memory", "Read-only file system",
    "cannot execute", "Too many open files", "File size limit exceeded", "Resource temporarily unavailable",
)  # fmt: skip
"""In what a compiler says: faults that may be gone another time, so that they are not remembered."""
_LACKING = ".lacks"
"""Suffix of the file that says what a compiled one does without, where the compiler has not all."""
_SIZE = ".size"
"""Suffix of the file that says how long a compiled one is."""
_MEMORY = 24 * 3600
"""Seconds for which it is remembered what a compiler refused."""
_PAUSE = 600
"""Seconds in which a compiler that took too long is not asked again, by processes that wait for one another."""

_log = logging.getLogger(__name__)


_TRUE = (Tensor, nn.Parameter)
_functorch: Any = getattr(torch._C, "_functorch", None)  # torch has no public names for these
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_forward_ad: Any = torch.autograd.forward_ad
_tracing: Callable[[], bool] = torch._C._is_tracing
_transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_wrapped: Callable[[Tensor], bool] = getattr(_functorch, "is_functorch_wrapped_tensor", lambda _: False)

_off = ContextVar("_off", default=False)
_tried: dict[Path, bool] = {}
"""Sources that were asked for, and whether they are there."""
_without: list[str] = []
"""What the compiler could not give compiled code."""
_spent: list[float] = []
"""Seconds of each compilation, its wait for others included."""


@contextmanager
def off() -> Iterator[None]:
    """Everything in the block is left to torch: the definition, and what compiled code is measured against."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def is_off() -> bool:
    """Whether that is so here, or for the whole process."""
    return is_off_here() or os.environ.get(SWITCH) == "0"


def is_off_here() -> bool:
    """Whether this is in a block of `off`: what is defined by layers of torch is made by them."""
    return _off.get()


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
    name = None if os.environ.get(SWITCH) == "0" else compiler()
    if name is None:
        _log.debug("%s is left to torch: no C++ compiler, or %s=0", source.stem, SWITCH)
        return None
    library = _of(source, name)
    _tried[source] = library is not None
    return library


def _of(source: Path, name: str) -> ctypes.CDLL | None:
    """name: of the compiler."""
    try:
        words = [*_texts(source), name.encode(), " ".join(_command() or ()).encode(), processor.identity()]
        key = hashlib.sha256(b"\0".join([*words, *(flag.encode() for flag in _FLAGS)])).hexdigest()[:16]
        target = cache_root() / "native" / f"{source.stem.strip('_')}-{key}.so"
        try:
            library = ctypes.CDLL(str(_made(source, target)))
        except OSError:
            library = (_loaded_elsewhere(target) if _is_whole(target) else None) or _remade(source, target)
        _note_what_lacks(target)
        return library
    except (OSError, subprocess.SubprocessError, AttnbenchError) as error:
        _log.warning("%s is left to torch, it could not be compiled and loaded: %s", source.name, error)
        return None


def readable(*tensors: Tensor) -> bool:
    """Whether compiled code may read these where they lie: true tensors, not traced, none in a function that torch.func
    maps or differentiates, or differentiated forwards, none a view that negates."""
    if torch.compiler.is_compiling() or _tracing() or _modes() or _transformed():  # first: this cannot be traced
        return False
    for each in tensors:
        if type(each) not in _TRUE or _wrapped(each) or each.is_neg():
            return False
    return _forward_ad._current_level < 0


def at(tensor: Any) -> ctypes.c_void_p:
    """Where the numbers of a contiguous tensor lie; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def engine() -> str | None:
    """What compiles the sources, with its version; None where they are left to torch, as when it could compile none of
    those that were asked for so far."""
    nothing = bool(_tried) and not any(_tried.values())
    made = None if os.environ.get(SWITCH) == "0" or nothing else compiler()
    return f"{made}, without {' and '.join(_without)}" if made and _without else made


def lacking() -> str | None:
    """What to tell of a processor on which everything is left to torch for want of a compiler; nothing where that is
    switched off, or where a compiler that is named does not run, which is told by itself."""
    if os.environ.get(SWITCH) == "0" or _command() is not None:
        return None
    return (
        "no C++ compiler is here, and everything is left to torch, which takes several times as long for sparse "
        "transforms: install g++ or clang++, or name one in CXX"
    )


def compiling_seconds() -> float:
    """What this process has spent on compiling so far, and on waiting for others that compile the same."""
    return sum(_spent)


def clock() -> float:
    """time.perf_counter, standing still while sources are compiled: once on a machine, which is no part of what a
    training or a search takes."""
    return time.perf_counter() - compiling_seconds()


@functools.cache
def compiler() -> str | None:
    """The C++ compiler with its version, as it says it; None where there is none. `$CXX` goes before others."""
    command = _command()
    if command is None:
        return None
    try:
        said = _run([*command, "--version"])
    except (OSError, subprocess.SubprocessError) as error:
        fault: object = error
    else:
        if said.returncode == 0:
            return said.stdout.partition("\n")[0].strip()
        fault = said.stderr.strip()[:200] or f"it ended with {said.returncode}"
    _log.warning("%s is no C++ compiler that runs, everything is left to torch: %s", " ".join(command), fault)
    return None


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
    if _is_whole(target):
        return target
    with _counted(), making(target):
        refused = target.with_suffix(".refused")
        if refused.is_file() and time.time() - refused.stat().st_mtime < _MEMORY:
            raise subprocess.SubprocessError(refused.read_text(encoding="utf-8", errors="replace"))
        if not _is_whole(target):
            _log.info("compiling %s for this processor, once", source.name)
            try:
                _compile(source, target)
            except subprocess.TimeoutExpired as error:
                refused.write_text(str(error), encoding="utf-8")
                forgotten = time.time() - _MEMORY + _PAUSE
                os.utime(refused, (forgotten, forgotten))
                raise
            except subprocess.CalledProcessError as error:
                if not _passes(error.stderr):
                    refused.write_text(error.stderr, encoding="utf-8")
                raise subprocess.SubprocessError(error.stderr) from None
    return target


def _is_whole(target: Path) -> bool:
    """Whether a compiled file is as long as it was made: one that is cut off would end the process that loads it. Of
    one that nothing is said of, and that cannot be made anew, it is believed."""
    try:
        return target.stat().st_size == int(target.with_suffix(_SIZE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return os.path.isfile(target) and not os.access(target.parent, os.W_OK)
    except (OSError, ValueError):
        return False


def _note_what_lacks(target: Path) -> None:
    """Say once what compiled code does without: it is slower as long as it is kept."""
    try:
        lacking = target.with_suffix(_LACKING).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for what in set(lacking) - set(_without):
        _without.append(what)
        _log.warning(
            "the C++ compiler makes code without %s, which is slower (clang++ wants libomp); another one, or a newer, "
            "can be named by $CXX; after a mend remove %s", what, target.parent,
        )  # fmt: skip


def _loaded_elsewhere(target: Path) -> ctypes.CDLL | None:
    """Where nothing in the cache may be run, as on some shared disks; None where the file is broken, or none is."""
    with tempfile.TemporaryDirectory(prefix="attnbench-") as folder, suppress(OSError):
        return ctypes.CDLL(shutil.copy(target, folder))
    return None


def _load_fault(library: Path) -> str | None:
    """Why a compiled file cannot be loaded, as where the library of a compiler's threads is not found; None: it can."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return None if _loaded_elsewhere(library) else str(error)
    return None


@contextmanager
def _counted() -> Iterator[None]:
    """As time that compiling takes."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _spent.append(time.perf_counter() - started)


@functools.cache
def _warn_uncached(folder: Path) -> None:
    _log.warning(
        "%s cannot be written to, or keeps no locks, or is full: every process compiles C++ sources anew; make room "
        "there, or set ATTNBENCH_CACHE to a folder of your own", folder,
    )  # fmt: skip


def _remade(source: Path, target: Path) -> ctypes.CDLL:
    """A broken file, which the next process would meet again, is made anew; where nothing can be written to the cache,
    one for this process alone."""
    try:
        if os.path.isfile(target):  # which raises nothing where the folder cannot be entered
            with suppress(OSError), _counted(), making(target):
                _compile(source, target)
                return ctypes.CDLL(str(target))
        _warn_uncached(target.parent)
        with _counted(), tempfile.TemporaryDirectory(prefix="attnbench-") as folder:
            made = Path(folder) / target.name
            _compile(source, made)
            _note_what_lacks(made)
            return ctypes.CDLL(str(made))
    except subprocess.CalledProcessError as error:
        raise subprocess.SubprocessError(error.stderr) from None


def _compile(source: Path, target: Path) -> None:
    """Raises CalledProcessError with what the compiler said of the source, or of the first way; OSError where there is
    no room."""
    half = target.with_suffix(f".{os.getpid()}")
    lacking = target.with_suffix(_LACKING)
    said: list[str] = []
    try:
        for machine in _MACHINE:
            for loops in _LOOPS:
                command = [*(_command() or ()), *_FLAGS, *_SILENT, machine, *loops, str(source), "-o", str(half)]
                done = _run(command)
                fault = done.stderr if done.returncode else _load_fault(half)
                if done.returncode < 0:
                    fault = f"Killed by signal {-done.returncode}. {done.stderr}"
                if fault is None:
                    lacking.unlink(missing_ok=True)
                    missed = _missed(machine, loops)
                    if missed:
                        lacking.write_text(missed, encoding="utf-8")
                    sync(half)
                    target.with_suffix(_SIZE).write_text(str(half.stat().st_size), encoding="utf-8")
                    os.replace(half, target)
                    return
                said.append(fault.strip()[:500])
                if any(words in fault for words in _NO_ROOM):  # here; there may be elsewhere
                    raise OSError(errno.ENOSPC, said[-1], str(target.parent))
                if _passes(fault):  # with other options it might work, and be slower for good
                    raise subprocess.CalledProcessError(1, str(source), stderr=said[-1])
    finally:
        half.unlink(missing_ok=True)  # what a compiler that was stopped had written
    own = (
        words for words in said if source.name in words
    )  # the others speak of options, which not every compiler knows
    raise subprocess.CalledProcessError(1, str(source), stderr=next(own, said[0]))


def _missed(machine: str, loops: Sequence[str]) -> str:
    """What code of these options does without."""
    own = machine == _MACHINE[0] or platform.machine() not in ("x86_64", "AMD64")
    lacks = {"this processor's instructions": not own, "threads": loops != _LOOPS[0]}
    return "\n".join(what for what, missed in lacks.items() if missed)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """In English, which `_PASSING` is in; another encoding is no fault. Raises TimeoutExpired, when all that the
    command started is ended."""
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    try:
        out, said = started.communicate(timeout=_PATIENCE)
    except BaseException:  # g++ has others work for it
        with suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.killpg(started.pid, signal.SIGKILL)
        for pipe in (started.stdout, started.stderr):
            assert pipe is not None
            pipe.close()  # one that outlives it may hold them
        started.wait()
        raise
    return subprocess.CompletedProcess(command, started.returncode, out, said)


def _passes(said: str) -> bool:
    return any(word in said for word in _PASSING)
