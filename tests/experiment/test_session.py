from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from attnbench.cli import common
from attnbench.core.errors import DataError
from attnbench.core.lock import locked
from attnbench.experiment import executor, session
from attnbench.experiment.dry_run import dry_run
from attnbench.experiment.executor import CellOutcome
from attnbench.experiment.grid import Cell
from attnbench.experiment.run import Run, is_done
from attnbench.experiment.session import run_grid
from attnbench.report.collect import collect
from attnbench.report.save import save

SEEDS = {"grid": {"seeds": [12, 13, 14], "axes": {"model.attention.default.budget": [1]}}}


def test_two_processes_give_the_numbers_of_one(bench: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executor.os, "sched_getaffinity", lambda _: {0}, raising=False)  # sums depend on the threads
    alone, together = bench.experiment({"name": "alone"}), bench.experiment({"name": "together"})
    assert [outcome.error for outcome in bench.run(alone)] == [None, None]
    # what is done in one experiment is not run again for another, so the second one is told to start afresh
    outcomes = bench.run(together, jobs=2, fresh=True)
    assert sorted(outcome.cell.label for outcome in outcomes) == ["budget-1", "budget-inf"]
    assert [outcome.error for outcome in outcomes] == [None, None]
    for index in range(2):
        weights = "checkpoints/step-4/model.safetensors"
        one, two = bench.cell(alone, index), bench.cell(together, index)
        assert (one / weights).read_bytes() == (two / weights).read_bytes()
        assert (one / "hyps" / "test.txt").read_bytes() == (two / "hyps" / "test.txt").read_bytes()


@pytest.mark.parametrize(("jobs", "timed", "warns"), [(2, True, True), (1, True, False), (2, False, False)])
def test_timing_in_company_is_said(
    bench: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, jobs: int, timed: bool, warns: bool
):
    class Idle:
        def map(self, cells: Any) -> Any:
            return iter(())

    monkeypatch.setattr(session, "choose_executor", lambda *given, **named: Idle())
    monkeypatch.setattr(logging.getLogger("attnbench"), "propagate", True)
    bench.run(bench.experiment({"timing": {"decode_runs": 1}} if timed else {}), jobs=jobs)
    assert ("compare them from --jobs 1" in caplog.text) == warns


def test_the_jobs_that_pay_are_asked_for_where_none_are_named(bench: Any, monkeypatch: pytest.MonkeyPatch):
    asked, given = [], []

    class Idle:
        def map(self, cells: Any) -> Any:
            return iter(())

    monkeypatch.setattr(session, "choose_executor", lambda *args, jobs, **named: given.append(jobs) or Idle())
    monkeypatch.setattr(session, "jobs_that_pay", lambda table, cells, *more, fresh: asked.append(len(cells)) or 2)
    for jobs in (1, None):
        bench.run(bench.experiment(), jobs=jobs)
    assert (asked, given) == ([2], [1, 2])


@pytest.mark.parametrize("lacking", ["no C++ compiler is here", None])
def test_what_a_machine_lacks_is_told_once(bench: Any, ran: list[Cell], monkeypatch: Any, caplog: Any, lacking: Any):
    monkeypatch.setattr(session.native, "lacking", lambda: lacking)
    monkeypatch.setattr(logging.getLogger("attnbench"), "propagate", True)
    bench.run(bench.experiment())
    assert len(ran) == 2
    assert caplog.text.count("no C++ compiler is here") == (lacking is not None)
    caplog.clear()
    bench.run(bench.experiment())  # all is done
    assert "compiler" not in caplog.text


def test_finished_cells_are_skipped_and_deleted_results_made_again(bench: Any, ran: list[Cell]):
    experiment = bench.experiment()
    assert len(bench.run(experiment)) == 2
    assert bench.run(experiment) == []
    (bench.cell(experiment, 1) / "result.json").unlink()
    assert [outcome.cell.label for outcome in bench.run(experiment)] == ["budget-inf"]
    assert [cell.label for cell in ran] == ["budget-1", "budget-inf", "budget-inf"]
    assert len(bench.run(experiment, fresh=True)) == 2


def test_a_failed_cell_is_shown_and_the_others_go_on(bench: Any, ran: list[Cell]):
    experiment = bench.experiment(SEEDS)
    assert [outcome.error for outcome in bench.run(experiment)] == [None, "RuntimeError: bad luck", None]
    assert [cell.status for cell in collect(bench.runs / "tiny").cells] == ["done", "failed", "done"]
    assert [outcome.cell.seed for outcome in bench.run(experiment)] == [13]


def test_a_saved_copy_keeps_the_reason_of_a_failure_and_not_its_traceback(bench: Any, ran: list[Cell]):
    experiment = bench.experiment(SEEDS)
    bench.run(experiment)
    cell = bench.cell(experiment, 1)
    assert (cell / "traceback.txt").is_file()
    copy = save(bench.runs / "tiny", bench.folder / "committed") / "cells" / cell.name
    assert (copy / "error.txt").read_text() == "RuntimeError: bad luck\n"
    assert not (copy / "traceback.txt").exists()


def test_one_run_under_two_labels_is_made_once(bench: Any, ran: list[Cell]):
    entries = [{"label": "a", "clip": 1.0}, {"label": "b", "clip": 1.0}, {"label": "c", "clip": 2.0}]
    experiment = bench.experiment({
        "grid": {"axes": {"train": entries, "model.attention.default.budget": [2]}},
    })  # fmt: skip
    assert [outcome.cell.label for outcome in bench.run(experiment)] == ["a budget-2", "b budget-2", "c budget-2"]
    assert [cell.label for cell in ran] == ["a budget-2", "c budget-2"]
    assert all(is_done(bench.runs / "tiny", cell) for cell in experiment.cells)
    assert bench.run(experiment) == []


def test_a_failure_counts_for_every_label(bench: Any, ran: list[Cell]):
    entries = [{"label": "a", "clip": 1.0}, {"label": "b", "clip": 1.0}]
    grid = {"seeds": [13], "axes": {"train": entries, "model.attention.default.budget": [2]}}
    assert [outcome.error for outcome in bench.run(bench.experiment({"grid": grid}))] == ["RuntimeError: bad luck"] * 2
    assert len(ran) == 1


def test_data_that_cannot_be_had_stop_the_grid_before_it_begins(bench: Any, tmp_path: Path, ran: list[Cell]):
    experiment = bench.experiment({}, "task={kind: translation, dataset: iwslt15-en-vi}")
    settings = common.settings(bench.runs, offline=True)
    object.__setattr__(settings, "cache", tmp_path / "empty")
    with pytest.raises(DataError):
        list(run_grid(experiment, settings, "x"))
    assert ran == []
    assert not bench.runs.exists()


def test_a_command_ends_with_1_when_a_cell_failed(bench: Any, ran: list[Cell], capsys: pytest.CaptureFixture[str]):
    experiment = bench.experiment(SEEDS)
    with pytest.raises(typer.Exit) as caught:
        common.conduct(experiment, bench.settings(), dry=False, as_json=True)
    assert caught.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["results"]
    assert (bench.runs / "tiny" / "results.json").is_file()


def test_a_table_that_cannot_be_made_does_not_end_the_grid(
    bench: Any, ran: list[Cell], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import attnbench.report.table as table

    write, calls = table.write_results, 0

    def failing(root: Path) -> Any:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise ValueError("a fault in the table")
        return write(root)

    monkeypatch.setattr(table, "write_results", failing)
    logging.getLogger("attnbench").propagate = True
    experiment = bench.experiment()
    common.conduct(experiment, bench.settings(), dry=False, as_json=True)
    assert len(ran) == 2
    assert "a fault in the table" in caplog.text
    assert (bench.runs / "tiny" / "results.json").is_file()


def test_outcomes_come_as_cells_end(bench: Any, ran: list[Cell]):
    outcomes = run_grid(bench.experiment(), bench.settings(), "x")
    first = next(outcomes)
    assert isinstance(first, CellOutcome)
    assert len(ran) == 1
    assert len(list(outcomes)) == 1


@pytest.mark.parametrize(
    "content", ["{}", '{"metrics": 3}', '{"digest": ', '{"metrics": {}, "data": 3}', '{"metrics": {}, "digest": "0"}']
)
def test_a_damaged_result_is_the_failure_of_its_cell_alone(
    bench: Any, ran: list[Cell], caplog: pytest.LogCaptureFixture, content: str
):
    experiment = bench.experiment()
    bench.run(experiment)
    damaged, other = bench.cell(experiment, 0), bench.cell(experiment, 1)
    (damaged / "result.json").write_text(content)
    (other / "result.json").unlink()
    ran.clear()
    plan = dry_run(experiment, bench.settings())
    assert [cell["done"] for cell in plan["cells"]] == [False, False]
    assert [cell["damaged"] is None for cell in plan["cells"]] == [False, True]
    assert caplog.text.count(f"{damaged / 'result.json'}") == 1
    outcomes = {outcome.cell.label: outcome.error for outcome in bench.run(experiment)}
    assert outcomes["budget-inf"] is None
    assert str(outcomes["budget-1"]).startswith(f"{damaged / 'result.json'} ")
    assert str(outcomes["budget-1"]).endswith(": delete it and run the cell again")
    assert [cell.label for cell in ran] == ["budget-inf"]
    assert (damaged / "result.json").read_text() == content  # nobody's work is thrown away unasked
    assert [outcome.error for outcome in bench.run(experiment, fresh=True)] == [None, None]


def test_twins_are_copies_of_the_run_that_was_made_anew(bench: Any, ran: list[Cell]):
    """Not of what an older one has left under a third label."""
    entries = [{"label": label, "clip": clip} for label, clip in (("z", 1), ("m", 1.0), ("a", 1.00))]
    experiment = bench.experiment(
        {"grid": {"axes": {"train": entries}}}, "model.attention={default: {transform: softmax}}"
    )
    bench.run(experiment)
    for place in range(3):
        result = bench.cell(experiment, place) / "result.json"
        result.write_text(json.dumps({**json.loads(result.read_text()), "commit": "old"}))
    assert [outcome.error for outcome in bench.run(experiment, fresh=True)] == [None, None, None]
    found = {
        json.loads((bench.cell(experiment, place) / "result.json").read_text()).get("commit") for place in range(3)
    }
    assert found == {None}


@pytest.mark.parametrize("content", ['{"digest": "%s"}', '{"digest": "%s", "metrics": {}, "data": 3}', "[]"])
def test_a_damaged_result_is_not_taken_over_by_a_twin(bench: Any, ran: list[Cell], content: str):
    twins = {"axes": {"train": [{"label": "a", "clip": 1}, {"label": "b", "clip": 1.0}]}}
    experiment = bench.experiment({"grid": twins}, "model.attention={default: {transform: softmax}}")
    bench.run(experiment)
    damaged, other = bench.cell(experiment, 0), bench.cell(experiment, 1)
    (damaged / "result.json").write_text(content.replace("%s", experiment.cells[0].digest))
    shutil.rmtree(other)
    ran.clear()
    assert [cell["done"] for cell in dry_run(experiment, bench.settings())["cells"]] == [False, False]
    outcomes = {outcome.cell.label: outcome.error for outcome in bench.run(experiment)}
    assert "is damaged" in (outcomes["a"] or "")
    assert outcomes["b"] is None
    assert [cell.label for cell in ran] == ["b"]


def test_a_table_that_another_command_puts_there_meanwhile_is_not_taken_for_ours(bench: Any, ran: list[Cell], caplog):
    ours = bench.experiment({"grid": {"axes": {"model.attention.default.budget": [1, 2]}}})
    theirs = bench.experiment({"grid": {"axes": {"model.attention.default.budget": [4]}}})
    for place, _ in enumerate(run_grid(ours, bench.settings(), "ours")):
        if place == 0:
            bench.run(theirs)
    found = collect(bench.runs / "tiny")
    assert [cell.label for cell in found.cells] == ["budget-1", "budget-2"]
    assert "another command has put its table there" in caplog.text
    assert len(list((bench.runs / "tiny" / "cells").iterdir())) == 3


def test_a_cell_that_another_process_does_meanwhile_is_done(bench: Any, monkeypatch: pytest.MonkeyPatch):
    """It is asked for again when all others have ended; one that is still held is told."""
    grid = {"seeds": [12, 13, 14], "axes": {"model.attention.default.budget": [1]}}
    experiment = bench.experiment({"grid": grid})
    first, second, third = experiment.cells
    root = bench.runs / experiment.name
    others = [locked(root / "cells" / cell.folder / "lock") for cell in (first, second)]

    def run_cell(cell: Cell, run: Run, place: Any, listen: Any) -> None:
        run.finish({"digest": cell.digest, "metrics": {}})
        (root / "cells" / first.folder / "result.json").write_text("{}")  # the other process has finished it

    monkeypatch.setattr(executor, "run_cell", run_cell)
    with others[0], others[1]:
        outcomes = bench.run(experiment)
    assert [outcome.cell for outcome in outcomes] == [third, first, second]
    assert [outcome.error for outcome in outcomes[:2]] == [None, None]
    assert "the cell is being run there; wait for it" in (outcomes[2].error or "")
