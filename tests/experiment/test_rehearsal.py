"""How many cells are trained at a time is what was measured to get most done."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from attnbench.core import measured
from attnbench.experiment import rehearsal
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import Place
from attnbench.experiment.rehearsal import jobs_that_pay

AXES = {"model.attention.default.budget": [2]}


@pytest.fixture
def cells(bench: Any) -> list[Cell]:
    return list(
        bench.experiment({"grid": {"seeds": [1, 2, 3, 4, 5], "axes": {"model.attention.default.budget": [2]}}}).cells
    )


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[int, float | None]:
    """Of so many at a time, instead of what would be measured; on four cores."""
    made: dict[int, float | None] = {}
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rehearsal, "usable_cores", lambda: 4)
    monkeypatch.setattr(rehearsal, "_together", lambda cell, count, place, devices: made[count])
    return made


@pytest.mark.parametrize(("found", "jobs"), [
    ({1: 100.0, 2: 130.0, 4: 150.0}, 4),
    ({1: 100.0, 2: 130.0, 4: 131.0}, 2),
    ({1: 100.0, 2: 102.0, 4: 104.0}, 1),
    ({1: 100.0, 2: 90.0, 4: 120.0}, 4),
    ({1: 100.0, 2: 130.0, 4: None}, 2),
])  # fmt: skip
def test_more_at_a_time_are_taken_where_they_make_clearly_more(cells, rates, bench, found, jobs):
    rates.update(found)
    assert jobs_that_pay(cells[0], cells, Place(bench.cache, "cpu"), ()) == jobs


def test_no_more_are_taken_than_there_are_cells_and_cores(cells, rates, bench, monkeypatch):
    place = Place(bench.cache, "cpu")
    assert jobs_that_pay(cells[0], cells[:1], place, ()) == 1
    rates.update({1: 1.0, 2: 2.0, 4: 4.0})
    assert jobs_that_pay(cells[0], cells[:3], place, ()) == 3
    monkeypatch.setattr(rehearsal, "usable_cores", lambda: 1)
    assert jobs_that_pay(cells[0], cells, place, ()) == 1


def test_gpus_are_shared_by_up_to_four_each(cells, rates, bench):
    rates.update({2: 2.0, 4: 3.0, 8: 9.0})
    place = Place(bench.cache, "cpu")
    assert jobs_that_pay(cells[0], [*cells, *cells], place, ("cuda:0", "cuda:1")) == 8
    assert jobs_that_pay(cells[0], cells[:3], place, ("cuda:0", "cuda:1")) == 3


def test_what_was_measured_is_kept_whichever_cells_are_left(cells, rates, bench):
    rates.update({1: 1.0, 2: 2.0, 4: 1.0})
    place = Place(bench.cache, "cpu")
    assert jobs_that_pay(cells[0], cells, place, ()) == 2
    rates.update({1: 9.0, 2: 2.0, 4: 1.0})
    assert jobs_that_pay(cells[0], cells, place, ()) == 2
    assert jobs_that_pay(cells[1], cells[2:], place, ()) == 2  # another seed first, and fewer


def test_a_rehearsal_that_fails_keeps_nothing(cells, rates, bench, caplog):
    place = Place(bench.cache, "cpu")
    rates.update({1: None})
    assert jobs_that_pay(cells[0], cells, place, ()) == 1
    assert f"[{cells[0].label}, seed 1] did not get through its rehearsal" in caplog.text
    rates.update({1: 1.0, 2: 2.0, 4: 1.0})
    assert jobs_that_pay(cells[0], cells, place, ()) == 2


def test_where_nothing_can_be_kept_it_is_one(cells, rates, bench, monkeypatch):
    monkeypatch.setattr(measured, "once", lambda *given, **more: None)
    assert jobs_that_pay(cells[0], cells, Place(bench.cache, "cpu"), ()) == 1


def test_timed_decoding_has_the_machine_for_itself(bench, rates, caplog):
    timed = bench.experiment({"timing": {"decode_runs": 1}, "grid": {"seeds": [1, 2], "axes": AXES}})
    with caplog.at_level(logging.INFO, "attnbench"):
        assert jobs_that_pay(timed.cells[0], timed.cells, Place(bench.cache, "cpu"), ()) == 1
    assert "one cell at a time, for decoding is timed" in caplog.text


def test_cells_are_trained_at_once_and_leave_nothing(bench, cells, monkeypatch):
    monkeypatch.setattr(rehearsal, "_SECONDS", 0.05)
    monkeypatch.setattr(rehearsal, "usable_cores", lambda: 2)
    before = sorted(path for path in bench.runs.rglob("*"))
    rate = rehearsal._together(cells[0], 2, Place(bench.cache, "cpu"), ())
    assert rate is not None
    assert rate > 0
    assert sorted(path for path in bench.runs.rglob("*")) == before


def test_one_that_fails_is_told_by_none(bench, cells, monkeypatch, tmp_path):
    """Its data are not there."""
    monkeypatch.setattr(rehearsal, "usable_cores", lambda: 2)
    assert rehearsal._together(cells[0], 2, Place(tmp_path / "empty", "cpu"), ()) is None
