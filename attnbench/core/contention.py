"""What other programs on the same cores cost threads that wait for one another, made small.

A thread of GNU's OpenMP, which torch brings on Linux, spins for milliseconds before it sleeps. Where another program
takes a core, the scheduler puts two threads of a loop on the same one, and the first spins in the time that the second
would need. Spinning less at all times is no cure: on idle cores it makes steps of decoding longer.
OpenMP itself spins 300 times less while a process has more of its threads than there are cores (GOMP_SPINCOUNT in its
manual); a team that does nothing sees to that as long as others use the cores, and no longer.

Measured beside one busy process, two threads on two cores of AVX2: updates 1.3 and 1.8 times as fast, small ones more,
searches 2.1 and 3.6 times; on idle cores 1.00 to 1.05 times, which is noise (experiments/speed/beside_others.py).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("attnbench")

_SAID_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables that say how long threads spin: then nothing is done here."""
_PERIOD = 0.5
"""Seconds between two looks."""
_SHARED, _FREE = 0.15, 0.05
"""Seconds in a second that the thread which waits most is ready and has no core: above the first cores are shared,
below the second no longer."""
_NOTICE, _PATIENCE = 2, 10
"""Looks in a row with others before they are believed, and without before threads spin again."""
_MOST = 8
"""Threads of the team that does nothing, at most: threads that compute on fewer cores than there are have others."""

_TOLD = "other programs use the same processor cores: what is timed now is slower than on idle ones"


@dataclass
class Shared:
    """seconds: in which other programs used the cores of this process; None where the system does not count."""

    seconds: float | None = None


@contextmanager
def relieved(threads: int, tell: Callable[[str], object] = log.info) -> Iterator[Shared]:
    """In the block, loops of so many threads take little harm from other programs. Those are only noticed where nothing
    is known to help: one thread, many cores left free, another OpenMP, an environment that says how threads wait.

    tell: is told once that there are others, from another thread.
    """
    libraries = _openmps()
    team = len(os.sched_getaffinity(0)) - threads + 2 if libraries else 0
    helps = threads > 1 and 2 <= team <= _MOST and not any(name in os.environ for name in _SAID_BY_USER)
    with watched(tell, Idle(libraries, team) if helps else None) as found:
        yield found


@contextmanager
def watched(tell: Callable[[str], object], idle: Idle | None = None) -> Iterator[Shared]:
    """Notice other programs in the block, without doing anything about it unless there is an idle team for that. tell:
    as in `relieved`."""
    found, ended = Shared(0.0 if waited() else None), threading.Event()
    if found.seconds is None:
        yield found
        return
    watch = threading.Thread(target=_watch, args=(idle, found, ended, tell), name="contention", daemon=True)
    watch.start()
    try:
        yield found
    finally:
        ended.set()
        watch.join()


def _openmps(maps: Path = Path("/proc/self/maps")) -> list[ctypes.CDLL]:
    """GNU's OpenMP, under every name by which this process has it already: torch's wheels may bring their own."""
    try:
        paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
        return [ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW) for path in sorted(paths)]
    except (OSError, AttributeError):
        return []


def _watch(idle: Idle | None, found: Shared, ended: threading.Event, tell: Callable[[str], object]) -> None:
    state, before, then = Sharing(), waited(), time.monotonic()
    try:
        while not ended.wait(_PERIOD):
            now, at = waited(), time.monotonic()
            most = max((now[each] - before.get(each, 0.0) for each in now), default=0.0)
            state = state.after(most / (at - then))
            if state.shared:
                first, found.seconds = not found.seconds, (found.seconds or 0.0) + at - then
                if first:
                    with suppress(Exception):  # as where nobody listens any more: the watch goes on
                        tell(_TOLD)
            before, then = now, at
            if idle is not None:
                idle.be(there=state.shared)
    finally:
        if idle is not None:
            idle.be(there=False)


class Sharing(NamedTuple):
    """Whether cores are shared with other programs. others: looks in a row in which it seems to be otherwise."""

    shared: bool = False
    others: int = 0

    def after(self, share: float) -> Sharing:
        """What is so after one more look. share: seconds in a second that a thread waited for a core."""
        others = self.others + 1 if (share < _FREE if self.shared else share > _SHARED) else 0
        turns = others == (_PATIENCE if self.shared else _NOTICE)
        return Sharing(not self.shared) if turns else Sharing(self.shared, others)


class Idle:
    """A team of OpenMP's threads that does nothing. It lives as long as the thread that made it."""

    def __init__(self, libraries: Sequence[ctypes.CDLL], team: int) -> None:
        self._libraries, self._team = libraries, team
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def be(self, *, there: bool) -> None:
        """Make it, or end it. It is not made where threads are scarce: OpenMP would end the process."""
        if there and self._thread is None and _can_start(self._team * (len(self._libraries) + 1)):
            self._ended.clear()
            thread = threading.Thread(target=self._live, name="idle team", daemon=True)
            thread.start()
            self._thread = thread
        elif not there and self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _live(self) -> None:
        for library in self._libraries:
            nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)  # a function that does no harm
            library.GOMP_parallel(nothing, None, ctypes.c_uint(self._team), ctypes.c_uint(0))
        self._ended.wait()


def _can_start(count: int) -> bool:
    """Whether so many threads can be there at once."""
    ended, made = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            each = threading.Thread(target=ended.wait, daemon=True)
            each.start()
            made.append(each)
    except RuntimeError:
        return False
    finally:
        ended.set()
        for each in made:
            each.join()
    return True


def waited(tasks: Path = Path("/proc/self/task")) -> dict[str, float]:
    """Seconds that each thread of this process was ready to run and had no core, as Linux counts them."""
    found = {}
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # it has ended, or the system does not count
            continue
    return found
