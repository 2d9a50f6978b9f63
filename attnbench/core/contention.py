"""What other programs on the same cores cost threads that wait for one another, made small.

A thread of GNU's OpenMP, which torch brings on Linux, spins for milliseconds before it sleeps. Where another program
takes a core, the scheduler puts two threads of a loop on the same one, and the first spins in the time that the second
would need. Spinning less is no cure for all times: on idle cores it makes steps of decoding up to 1.6 times as long.
OpenMP itself spins 300 times less while a process has more of its threads than there are cores (GOMP_SPINCOUNT in its
manual); a team that does nothing sees to that as long as others use the cores, and no longer.

Measured beside one busy process, two threads on two cores of AVX2: updates 1.3 to 2.5 times as fast, small ones more,
searches 2.4 to 3.6 times; on idle cores the watch costs 1 to 2%, within noise.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("attnbench")

_SAID_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables that say how long threads spin: then nothing is done here."""
_PERIOD = 0.5
"""Seconds between two looks."""
_SHARED, _FREE = 0.25, 0.05
"""Seconds that the threads of this process wait for a core, in a second: from the first on cores are shared, below the
second no longer. On idle cores it is 0.01, beside one busy process 0.3 to 0.8."""
_PATIENCE = 10
"""Looks in a row without others before threads spin again."""
_MOST = 64
"""Threads of the team that does nothing, at most."""


@dataclass
class Shared:
    """seconds: in which other programs used the cores of this process, as far as it was watched."""

    seconds: float = 0.0


@contextmanager
def relieved(threads: int, tell: Callable[[str], object] = log.info) -> Iterator[Shared]:
    """In the block, loops of so many threads take little harm from other programs. Nothing is watched where nothing is
    known to help: one thread alone, another system or OpenMP, an environment that says how threads wait.

    tell: is told once that there are others, from another thread.
    """
    library = _openmp()
    team = len(os.sched_getaffinity(0)) - threads + 2 if library is not None else 0
    if library is None or threads < 2 or not 2 <= team <= _MOST or any(name in os.environ for name in _SAID_BY_USER):
        yield Shared()
        return
    with watched(tell, Idle(library, team)) as found:
        yield found


@contextmanager
def watched(tell: Callable[[str], object], idle: Idle | None = None) -> Iterator[Shared]:
    """Notice other programs in the block, without doing anything about it unless there is an idle team for that. tell:
    as in `relieved`."""
    found, ended = Shared(), threading.Event()
    watch = threading.Thread(target=_watch, args=(idle, found, ended, tell), name="contention", daemon=True)
    watch.start()
    try:
        yield found
    finally:
        ended.set()
        watch.join()


def _openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP, where this process has it already."""
    if not hasattr(os, "RTLD_NOLOAD") or not hasattr(os, "sched_getaffinity"):
        return None
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _watch(idle: Idle | None, found: Shared, ended: threading.Event, tell: Callable[[str], object]) -> None:
    state, before, then = Sharing(), waited(), time.monotonic()
    try:
        while not ended.wait(_PERIOD):
            now, at = waited(), time.monotonic()
            state = state.after(sum(now[each] - before.get(each, 0.0) for each in now) / (at - then))
            if state.shared and not found.seconds:
                tell("other programs use the same processor cores: what is timed now is slower than on idle ones")
            if state.shared:
                found.seconds += at - then
            before, then = now, at
            if idle is not None:
                idle.be(there=state.shared)
    finally:
        if idle is not None:
            idle.be(there=False)


class Sharing(NamedTuple):
    """Whether cores are shared with other programs. free: looks in a row in which they seemed not to be."""

    shared: bool = False
    free: int = 0

    def after(self, share: float) -> Sharing:
        """What is so after one more look. share: seconds that threads waited for a core, in a second."""
        if not self.shared:
            return Sharing(share > _SHARED)
        free = self.free + 1 if share < _FREE else 0
        return Sharing(free < _PATIENCE, free)


class Idle:
    """A team of OpenMP's threads that does nothing. It lives as long as the thread that made it."""

    def __init__(self, library: ctypes.CDLL, team: int) -> None:
        self._library, self._team = library, team
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def be(self, *, there: bool) -> None:
        """Make it, or end it."""
        if there and self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._live, name="idle team", daemon=True)
            self._thread.start()
        elif not there and self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _live(self) -> None:
        nothing = ctypes.cast(self._library.omp_get_thread_num, ctypes.c_void_p)  # a function that does no harm
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(self._team), ctypes.c_uint(0))
        self._ended.wait()


def waited(tasks: Path = Path("/proc/self/task")) -> dict[str, float]:
    """Seconds that each thread of this process was ready to run and had no core, as Linux counts them."""
    found = {}
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # it has ended, or the system does not count
            continue
    return found
