"""How many cells are trained at a time is what was measured to get most done."""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

import pytest

from attnbench.core import measured
from attnbench.experiment import rehearsal
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import Place
from attnbench.experiment.rehearsal import Rehearsal, jobs_that_pay

AXES = {"model.attention.default.budget": [2]}


@pytest.fixture
def cells(bench: Any) -> list[Cell]:
    return list(bench.experiment({"grid": {"seeds": [1, 2, 3, 4, 5], "axes": AXES}}).cells)


@pytest.fixture
def asked(bench: Any, cells: list[Cell]) -> Any:
    """What is asked for these cells, or those of them that are pending."""

    def ask(pending: list[Cell] | None = None, devices: tuple[str, ...] = (), fresh: bool = False) -> int:
        return jobs_that_pay(cells, pending or cells, Place(bench.cache, "cpu"), devices, fresh=fresh)

    return ask


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[int, Rehearsal]:
    """Of so many at a time, instead of what would be measured; on four cores."""
    made: dict[int, Rehearsal] = {}
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rehearsal, "usable_cores", lambda: 4)
    monkeypatch.setattr(rehearsal, "_together", lambda cell, count, place, devices: made[count])
    return made


def rates(given: dict[int, float]) -> dict[int, Rehearsal]:
    return {count: Rehearsal(rate) for count, rate in given.items()}


@pytest.mark.parametrize(("given", "jobs"), [
    ({1: 100.0, 2: 130.0, 4: 150.0}, 4),
    ({1: 100.0, 2: 130.0, 4: 131.0}, 2),
    ({1: 100.0, 2: 102.0}, 1),  # four are not tried
])  # fmt: skip
def test_more_at_a_time_are_taken_where_they_make_clearly_more(asked, found, given, jobs):
    found.update(rates(given))
    assert asked() == jobs


def test_no_more_are_taken_than_there_are_cells_and_cores(asked, cells, found, monkeypatch):
    assert asked(cells[:1]) == 1
    found.update(rates({1: 1.0, 2: 2.0, 4: 4.0}))
    assert asked(cells[:3]) == 3
    monkeypatch.setattr(rehearsal, "usable_cores", lambda: 1)
    assert asked() == 1


def test_cells_of_one_training_are_one(bench, found):
    """The second takes over what the first has trained, and a job for it would have a part of the cores for nothing."""
    found.update(rates({1: 1.0, 2: 2.0}))
    table = bench.experiment({"grid": {"axes": {**AXES, "search.max_extra": [3, 4]}}}).cells
    place = Place(bench.cache, "cpu")
    assert jobs_that_pay(table, table, place, (), fresh=False) == 1
    assert jobs_that_pay(table, table, place, (), fresh=True) == 2


def test_gpus_are_shared_by_up_to_four_each(asked, cells, found):
    found.update(rates({2: 2.0, 4: 3.0}))
    assert asked(devices=("cuda:0", "cuda:1")) == 4  # eight are more than there are
    assert asked(cells[:3], devices=("cuda:0", "cuda:1")) == 3


def test_what_was_measured_is_kept_whichever_cells_are_left(asked, cells, found, caplog):
    found.update(rates({1: 1.0, 2: 2.0, 4: 1.0}))
    with caplog.at_level(logging.INFO, "attnbench"):
        assert asked() == 2
        assert "--jobs auto: 2 at a time make 2 target tokens a second, 2.00 times those of 1" in caplog.text
        assert "--jobs auto: 2 at a time (kept in the cache)" in caplog.text
        found.update(rates({1: 9.0, 2: 2.0, 4: 1.0}))
        assert asked() == 2
        assert asked(cells[2:]) == 2
        assert "--jobs auto: 2 at a time (as was measured before)" in caplog.text


@pytest.mark.parametrize(("bad", "jobs", "why"), [
    ({1: Rehearsal(fault="DataError: gone")}, 1, "with 1 at a time DataError: gone"),
    ({1: Rehearsal(1.0), 2: Rehearsal(2.0), 4: Rehearsal(fault="no memory")}, 2, "with 4 at a time no memory"),
    ({1: Rehearsal(1.0, 4.0), 2: Rehearsal(9.0), 4: Rehearsal(9.0)}, 2, "other programs use the same processor cores"),
])  # fmt: skip
def test_what_is_not_sure_is_not_kept(asked, found, caplog, bad, jobs, why):
    found.update(bad)
    with caplog.at_level(logging.INFO, "attnbench"):
        assert asked() == jobs
    assert f"--jobs auto: {jobs} at a time (for this time: {why}" in caplog.text
    found.update(rates({1: 1.0, 2: 2.0, 4: 4.0}))
    assert asked() == 4


def test_where_nothing_can_be_kept_it_is_one(asked, found, monkeypatch):
    monkeypatch.setattr(measured, "once", lambda *given, **more: None)
    assert asked() == 1


def test_timed_decoding_has_the_machine_for_itself(bench, found, caplog):
    timed = bench.experiment({"timing": {"decode_runs": 1}, "grid": {"seeds": [1, 2], "axes": AXES}}).cells
    with caplog.at_level(logging.INFO, "attnbench"):
        assert jobs_that_pay(timed, timed, Place(bench.cache, "cpu"), (), fresh=False) == 1
    assert "one cell at a time, for decoding is timed" in caplog.text


def test_cells_are_trained_at_once_and_leave_nothing(bench, cells, monkeypatch, snapshot):
    monkeypatch.setattr(rehearsal, "_SECONDS", 0.05)
    monkeypatch.setattr(rehearsal, "usable_cores", lambda: 2)
    before = snapshot(bench.folder)
    found = rehearsal._together(cells[0], 2, Place(bench.cache, "cpu"), ())
    assert found.fault is None
    assert found.rate > 0
    assert snapshot(bench.folder) == before
    assert not multiprocessing.active_children()


def test_one_that_fails_says_why_and_ends_those_that_wait_for_it(bench, cells, monkeypatch):
    monkeypatch.setattr(rehearsal, "usable_cores", lambda: 2)
    found = rehearsal._together(cells[0], 2, Place(bench.cache), ("cpu", "nonsense"))
    assert found.fault == "SpecError: --device nonsense: no such kind of device; use auto, cpu, cuda, cuda:N or mps"
    assert not multiprocessing.active_children()
