from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attnbench.core import lock
from attnbench.core.lock import LockedError, is_locked, locked, making

HOLD = """
import sys, time
from pathlib import Path
from attnbench.core.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds tmp_path/lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_and_a_kill_frees_the_lock(tmp_path: Path, holder: subprocess.Popen[str]):
    path = tmp_path / "lock"
    assert is_locked(path)
    with pytest.raises(LockedError, match=str(holder.pid)), locked(path):
        raise AssertionError
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert path.exists()  # nobody was left to remove it
    assert not is_locked(path)
    with locked(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert is_locked(path)
    assert not path.exists()


def test_the_lock_is_freed_when_the_block_fails(tmp_path: Path):
    path = tmp_path / "sub" / "lock"
    with pytest.raises(RuntimeError), locked(path):
        raise RuntimeError
    assert not is_locked(path)
    assert os.listdir(path.parent) == []


def test_the_end_of_one_leaves_a_lock_that_has_taken_its_place(tmp_path: Path):
    path = tmp_path / "lock"
    first = locked(path)
    first.__enter__()
    path.unlink()  # by hand
    with locked(path):
        first.__exit__(None, None, None)
        assert is_locked(path)
        with pytest.raises(LockedError), locked(path):
            pass
    assert not path.exists()


def test_the_same_process_cannot_hold_it_twice(tmp_path: Path):
    with locked(tmp_path / "lock"):
        with pytest.raises(LockedError), locked(tmp_path / "lock"):
            raise AssertionError
        assert is_locked(tmp_path / "lock")


def test_looking_at_a_lock_keeps_nobody_from_taking_it(tmp_path: Path):
    path = tmp_path / "lock"
    path.touch()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            is_locked(path)

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(100):
            with locked(path):
                pass
            path.touch()
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()


def test_what_one_makes_the_others_find(tmp_path: Path):
    made, seen = tmp_path / "deep" / "thing", []

    def make() -> None:
        with making(made):
            seen.append(made.exists())
            made.touch()

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [False, True, True, True]


def test_who_waits_long_says_for_what(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "_SILENCE", 0.05)
    made, held, over = tmp_path / "thing", threading.Event(), threading.Event()

    def make() -> None:
        with making(made):
            held.set()
            over.wait(30)

    def end() -> None:
        while "waiting for" not in caplog.text:
            time.sleep(0.01)
        over.set()

    others = [threading.Thread(target=each, daemon=True) for each in (make, end)]
    others[0].start()
    held.wait(30)
    others[1].start()
    with making(made):
        assert str(made) in caplog.text
        assert over.is_set()
    for each in others:
        each.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_is_told_and_looked_at(tmp_path: Path, monkeypatch, number):
    def refused(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", refused)
    for hold in (locked, making):
        with (
            pytest.raises(OSError, match="keeps no locks; name a folder on another disk") as found,
            hold(tmp_path / "a"),
        ):
            raise AssertionError
        assert found.value.errno == number
        assert found.value.filename.startswith(str(tmp_path / "a"))
    (tmp_path / "b").touch()
    assert not is_locked(tmp_path / "b")


def test_another_fault_of_a_lock_is_not_hidden(tmp_path: Path, monkeypatch):
    def failed(file, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lock.fcntl, "flock", failed)
    (tmp_path / "b").touch()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        is_locked(tmp_path / "b")
