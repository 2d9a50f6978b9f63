"""That others use the cores is told by how long threads wait for one; an idle team is there meanwhile."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

from attnbench.core import contention
from attnbench.core.contention import Idle, Shared, Sharing, relieved, waited


def test_cores_are_shared_from_two_looks_to_many_quiet_ones():
    state = Sharing()
    for share in (0.0, contention._SHARED, 0.9, 0.1, 0.9):  # one long wait is none
        state = state.after(share)
        assert not state.shared
    state = state.after(0.3)
    assert state.shared
    for share in [0.0] * (contention._PATIENCE - 1) + [0.1] + [0.0] * (contention._PATIENCE - 1):  # 0.1: not yet
        state = state.after(share)
        assert state.shared
    assert not state.after(0.0).shared


def test_what_threads_waited_is_read_of_each(tmp_path):
    for name, text in {"7": "10 1500000000 3", "8": "10 0 3", "9": "nothing", "10": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    (tmp_path / "11").mkdir()  # it has ended
    assert waited(tmp_path) == {"7": 1.5, "8": 0.0}


class Looks:
    """An event that is set after so many looks."""

    def __init__(self, count: int) -> None:
        self.left = count

    def wait(self, seconds: float) -> bool:
        self.left -= 1
        return self.left < 0


class Team:
    """Notes whether it was there, at each look."""

    def __init__(self) -> None:
        self.noted: list[bool] = []

    def be(self, *, there: bool) -> None:
        self.noted.append(there)


@pytest.mark.parametrize(("shares", "noted", "seconds"), [
    ([0.0, 0.1, 0.0], [False, False, False], 0.0),
    ([0.6, 0.0, 0.6, 0.0], [False, False, False, False], 0.0),
    ([0.0, 0.6, 0.3, 0.0], [False, False, True, True], 2.0),
    ([0.6, 0.6, *[0.0] * 11, 0.7, 0.7], [False, *[True] * 10, False, False, False, True], 11.0),
])  # fmt: skip
def test_a_team_is_there_while_cores_are_shared(shares, noted, seconds, monkeypatch):
    """Looks of one second each; it is told once."""
    clock, sums = iter(range(99)), iter([sum(shares[:count]) for count in range(len(shares) + 1)])
    monkeypatch.setattr(contention, "waited", lambda: {"1": next(sums), "2": 0.0})
    monkeypatch.setattr(contention.time, "monotonic", lambda: float(next(clock)))
    team, found, told = Team(), Shared(0.0), []

    def tell(message: str) -> None:
        told.append(message)
        raise RuntimeError("nobody listens")

    contention._watch(team, found, Looks(len(shares)), tell)  # pyright: ignore[reportArgumentType]
    assert team.noted == [*noted, False]  # in the end, too
    assert found.seconds == seconds
    assert len(told) == (seconds > 0)


def test_a_wait_of_many_threads_is_that_of_the_longest(monkeypatch):
    """Of forty, each of which waits a little on idle cores, no sum is made."""
    looks = iter([{str(each): count * 0.01 for each in range(40)} for count in range(6)])
    clock = iter(range(99))
    monkeypatch.setattr(contention, "waited", lambda: next(looks))
    monkeypatch.setattr(contention.time, "monotonic", lambda: float(next(clock)))
    found = Shared(0.0)
    contention._watch(None, found, Looks(5), lambda told: None)  # pyright: ignore[reportArgumentType]
    assert found.seconds == 0


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def until(there: bool, count: int) -> bool:
    """Whether there are more threads than `count`, or no more, within seconds."""
    for _ in range(200):
        if (tasks() > count) is there:
            return True
        time.sleep(0.02)
    return False


needs_openmp = pytest.mark.skipif(not contention._openmps(), reason="torch brings no OpenMP of GNU's here")


@needs_openmp
def test_an_idle_team_has_threads_that_end_with_it():
    before, idle = tasks(), Idle(contention._openmps()[:1], 4)
    idle.be(there=True)
    idle.be(there=True)  # once
    assert until(True, before + 3)
    assert tasks() <= before + 4
    torch.ones(1 << 20).add_(1)  # loops go on
    idle.be(there=False)
    idle.be(there=False)
    assert until(False, before)


@needs_openmp
def test_a_watch_lives_as_long_as_its_block(monkeypatch):
    for name in contention._SAID_BY_USER:
        monkeypatch.delenv(name, raising=False)
    names = lambda: [each.name for each in threading.enumerate()]  # noqa: E731
    threads = max(2, len(os.sched_getaffinity(0)))
    with relieved(threads) as found:
        assert "contention" in names()
    assert "contention" not in names()
    assert found.seconds is not None
    monkeypatch.setattr(contention, "waited", dict)  # where the system does not count
    with relieved(threads) as found:
        assert "contention" not in names()
    assert found.seconds is None


@needs_openmp
def test_where_a_team_helps(monkeypatch):
    teams: list[int | None] = []

    class Noted(Idle):
        def __init__(self, libraries: Any, team: int) -> None:
            super().__init__(libraries, team)
            teams.append(team)

    for name in contention._SAID_BY_USER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(contention, "Idle", Noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for threads in (16, 10, 9, 1, 17):
        with relieved(threads):
            pass
    assert teams == [2, 8]
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # who says how threads wait is heeded
    with relieved(16):
        pass
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setattr(contention, "_openmps", list)
    with relieved(16):
        pass
    assert teams == [2, 8]


def test_no_team_is_made_where_threads_are_scarce(monkeypatch):
    """OpenMP ends the process that cannot have one."""

    class Never:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    begun = threading.Thread.start
    count = iter(range(99))

    def start(self: threading.Thread) -> None:
        if next(count) >= 3:
            raise RuntimeError("can't start new thread")
        begun(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    idle = Idle([Never()], 4)  # pyright: ignore[reportArgumentType]
    idle.be(there=True)
    idle.be(there=False)


def test_every_openmp_of_gnus_is_found(tmp_path):
    (tmp_path / "maps").write_text(
        "7f-80 r-xp 0 0:1 5    /nowhere/libgomp-a1b2.so.1\n7f-80 r-xp 0 0:1 5    /lib/libc.so\n"
    )
    assert contention._openmps(tmp_path / "maps") == []  # it is not there
    assert contention._openmps(tmp_path / "absent") == []


def test_others_are_noticed_without_a_team(monkeypatch):
    monkeypatch.setattr(contention, "_PERIOD", 0.01)
    sums = iter(range(1, 9999))
    monkeypatch.setattr(contention, "waited", lambda: {"1": float(next(sums))})
    told: list[str] = []
    with contention.watched(told.append) as found:
        time.sleep(0.2)
    assert found.seconds > 0
    assert len(told) == 1


def test_a_system_that_does_not_count_tells_nothing(tmp_path):
    assert waited(tmp_path / "absent") == {}


@needs_openmp
def test_threads_that_wait_for_a_core_are_seen():
    """Two that compute on one core, side by side."""
    before, cores = sum(waited().values()), os.sched_getaffinity(0)
    stop = time.monotonic() + 0.3

    def compute() -> None:
        os.sched_setaffinity(0, {min(cores)})
        while time.monotonic() < stop:
            torch.ones(1000).sum()

    both = [threading.Thread(target=compute) for _ in range(2)]
    for each in both:
        each.start()
    while time.monotonic() < stop - 0.05:
        time.sleep(0.01)
    found = sum(waited().values()) - before
    for each in both:
        each.join()
    if not waited():
        pytest.skip("this system does not count how long threads wait for a core")
    assert found > 0.1  # beside nobody it is hundredths
