"""A figure of the machine is measured once, and kept."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
import torch

from attnbench.core import measured
from attnbench.core.errors import AttnbenchError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_measured_once_and_then_read(cache):
    asked = itertools.count(3)
    assert [measured.once("file", "speed", lambda: next(asked)) for _ in range(3)] == [3, 3, 3]
    (kept,) = (cache / "machine").glob("file-*.json")
    assert json.loads(kept.read_text())["speed"] == 3
    assert json.loads(kept.read_text())["torch"] == torch.__version__


def test_other_threads_have_a_figure_of_their_own(cache, monkeypatch):
    assert measured.once("file", "speed", lambda: 1) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    assert measured.once("file", "speed", lambda: 2) == 2


def test_another_version_of_what_is_measured_has_a_figure_of_its_own(cache):
    assert measured.once("file", "speed", lambda: 1, of="first") == 1
    assert measured.once("file", "speed", lambda: 2, of="second") == 2
    assert measured.once("file", "speed", lambda: 3, of="first") == 1


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"speed": "fast"}'])
def test_a_broken_file_is_written_anew(broken, cache):
    measured.once("file", "speed", lambda: 1)
    (kept,) = (cache / "machine").glob("file-*.json")
    kept.write_text(broken)
    assert measured.once("file", "speed", lambda: 2) == 2
    assert measured.once("file", "speed", lambda: 3) == 2


def test_nothing_is_measured_that_cannot_be_kept(cache):
    cache.write_text("a file where the folder would be")
    assert measured.once("file", "speed", lambda: pytest.fail("measured")) is None


def test_ways_are_timed_in_turns(monkeypatch):
    clock, seen = iter([0, 9, 9, 10, 10, 14, 14, 16]), []
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(clock))
    found = measured.gain({"old": lambda: seen.append("old"), "new": lambda: seen.append("new")}, 2, enough=0.8)
    assert seen == ["old", "new", "old", "new"]
    assert found == 4 / 1


@pytest.mark.parametrize(("took", "found", "timed"), [
    ([1, 2, 1, 1], 1, 2),  # another process had the processor at first
    ([1, 2, 1, 4, 1, 3], 0.5, 3),  # it is slower
    ([2, 1], 2, 1),
])  # fmt: skip
def test_what_seems_slower_is_timed_again_before_it_is_refused_for_good(monkeypatch, took, found, timed):
    ends = [moment for end in range(len(took)) for moment in (sum(took[:end]), sum(took[: end + 1]))]
    clock, seen = iter(ends), []
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(clock))
    assert measured.gain({"old": lambda: seen.append(1), "new": lambda: None}, 1, enough=0.8) == found
    assert len(seen) == timed


@pytest.mark.parametrize("fact", ["processor", "torch", "nothing"])
def test_another_machine_measures_for_itself(cache, monkeypatch, fact):
    """A cache may lie on a disk that several share."""
    assert measured.once("file", "speed", lambda: 1) == 1
    if fact == "processor":
        monkeypatch.setattr(measured.processor, "identity", lambda: b"another")
    if fact == "torch":
        monkeypatch.setattr(measured.torch, "__version__", "another")
    assert measured.once("file", "speed", lambda: 2) == (1 if fact == "nothing" else 2)


def test_a_fault_of_what_is_measured_is_not_one_of_the_cache(cache):
    def wrong():
        raise AttnbenchError("the product is wrong")

    with pytest.raises(AttnbenchError, match="the product is wrong"):
        measured.once("file", "speed", wrong)


def test_what_another_measured_while_one_waited_is_taken(cache, monkeypatch):
    real = measured.making

    @contextlib.contextmanager
    def waited(path):
        with real(path):
            path.write_text(json.dumps({"speed": 3}))
            yield

    monkeypatch.setattr(measured, "making", waited)
    assert measured.once("file", "speed", lambda: pytest.fail("measured twice")) == 3


def test_a_home_that_nobody_knows_measures_nothing(monkeypatch):
    monkeypatch.setenv("ATTNBENCH_CACHE", "~nobody-of-that-name/cache")
    assert measured.once("file", "speed", lambda: pytest.fail("measured")) is None
