"""That others use the cores is told by how long threads wait for one; an idle team is there meanwhile."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from attnbench.core import contention
from attnbench.core.contention import Idle, Shared, Sharing, relieved, waited


def test_cores_are_shared_from_one_look_to_many_quiet_ones():
    state = Sharing()
    for share in (0.0, 0.2, contention._SHARED):
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
    ([0.0, 0.6, 0.3, 0.0], [False, True, True, True], 3.0),
    ([0.6, *[0.0] * 11, 0.7], [*[True] * 10, False, False, True], 11.0),
])  # fmt: skip
def test_a_team_is_there_while_cores_are_shared(shares, noted, seconds, monkeypatch):
    """Looks of one second each; it is told once."""
    clock, sums = iter(range(99)), iter([sum(shares[:count]) for count in range(len(shares) + 1)])
    monkeypatch.setattr(contention, "waited", lambda: {"1": next(sums)})
    monkeypatch.setattr(contention.time, "monotonic", lambda: float(next(clock)))
    team, found, told = Team(), Shared(), []
    contention._watch(team, found, Looks(len(shares)), told.append)  # pyright: ignore[reportArgumentType]
    assert team.noted == [*noted, False]  # in the end, too
    assert found.seconds == seconds
    assert len(told) == (seconds > 0)


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def until(there: bool, count: int) -> bool:
    """Whether there are more threads than `count`, or no more, within seconds."""
    for _ in range(200):
        if (tasks() > count) is there:
            return True
        time.sleep(0.02)
    return False


needs_openmp = pytest.mark.skipif(contention._openmp() is None, reason="torch brings no OpenMP of GNU's here")


@needs_openmp
def test_an_idle_team_has_threads_that_end_with_it():
    library = contention._openmp()
    assert library is not None
    before, idle = tasks(), Idle(library, 4)
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
    assert found.seconds == 0
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # who says how threads wait is heeded
    for count in (1, threads):
        with relieved(count):
            assert "contention" not in names()
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setattr(contention, "_openmp", lambda: None)
    with relieved(threads):
        assert "contention" not in names()


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
    assert found > 0
