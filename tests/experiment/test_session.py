from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from attnbench.cli import common
from attnbench.core.errors import AttnbenchError, DataError, SpecError
from attnbench.core.lock import locked
from attnbench.experiment import executor, session
from attnbench.experiment.executor import CellOutcome
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import content_sha256
from attnbench.experiment.run import Run, is_done
from attnbench.experiment.session import Settings, dry_run, prepare_named, run_grid
from attnbench.report.collect import collect
from attnbench.report.save import save


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that were run, each finished at once; cells of seed 13 fail."""
    seen: list[Cell] = []

    def run_cell(cell: Cell, run: Run, place: Any, listen: Any) -> None:
        seen.append(cell)
        if cell.seed == 13:
            raise RuntimeError("bad luck")
        run.finish({"digest": cell.digest, "metrics": {"test/bleu": 1.0}})

    monkeypatch.setattr(executor, "run_cell", run_cell)
    return seen


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


def test_results_committed_beside_the_spec_are_done(bench: Any, ran: list[Cell]):
    experiment = bench.experiment()
    first = experiment.cells[0]
    committed = bench.folder / "results" / "tiny" / "cells" / first.folder
    committed.mkdir(parents=True)
    (committed / "result.json").write_text(json.dumps({"digest": first.digest, "metrics": {}}))
    assert [outcome.cell.label for outcome in bench.run(experiment)] == ["budget-inf"]
    assert is_done(bench.runs / "tiny", first)
    assert [cell.status for cell in collect(bench.runs / "tiny").cells] == ["done", "done"]


def test_the_same_run_in_another_experiment_is_done(bench: Any, ran: list[Cell]):
    bench.run(bench.experiment({"name": "one"}))
    other = bench.experiment({"name": "deep/two", "grid": {"axes": {"model.attention.default.budget": [2, 1]}}})
    assert [outcome.cell.label for outcome in bench.run(other)] == ["budget-2"]


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


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_dry_run_writes_nothing(
    bench: Any, snapshot: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], prepared: bool, as_json: bool
):
    if not prepared:
        bench.cache = tmp_path / "no cache"
    experiment = bench.experiment({"table": {"rows": "budget"}})
    folders = [folder for folder in (bench.folder, bench.cache) if folder.exists()]
    before = snapshot(*folders)
    common.conduct(experiment, bench.settings(), dry=True, as_json=as_json)
    assert snapshot(*folders) == before
    assert not bench.runs.exists()
    assert bench.cache.exists() == prepared
    out = capsys.readouterr().out
    plan = json.loads(out) if as_json else dry_run(experiment, bench.settings())
    assert [cell["data_ready"] for cell in plan["cells"]] == [prepared, prepared]
    assert [cell["done"] for cell in plan["cells"]] == [False, False]
    assert plan["cells"][0]["parameters"] > 1000
    assert plan["spec"]["model"]["width"] == 16
    assert plan["folder"] == str(bench.runs / "tiny")
    assert experiment.cells[0].digest[:8] in out


def test_results_taken_over_have_the_text_of_the_corpus_again(bench: Any):
    """A saved table holds none of it; paired tests and examples need it."""
    experiment = bench.experiment()
    bench.run(experiment)
    folder = bench.cell(experiment)
    names = [f"hyps/{split}.{side}.txt" for split in ("valid", "test") for side in ("ref", "src")]
    wanted = {name: (folder / name).read_bytes() for name in names}
    assert wanted["hyps/test.ref.txt"] != wanted["hyps/test.src.txt"]
    save(bench.runs / "tiny", bench.folder / "results")
    assert (bench.folder / "results" / "tiny" / "cells" / folder.name / "hyps" / "test.txt").is_file()
    assert not [path for side in ("ref", "src") for path in (bench.folder / "results").rglob(f"*.{side}.txt")]
    shutil.rmtree(bench.runs)
    assert bench.run(experiment) == []
    assert {name: (folder / name).read_bytes() for name in names} == wanted
    (folder / "hyps/test.ref.txt").unlink()
    bench.run(experiment)  # one of our own, in the same state
    assert (folder / "hyps/test.ref.txt").read_bytes() == wanted["hyps/test.ref.txt"]


def test_a_dry_run_knows_what_is_done(bench: Any, ran: list[Cell]):
    experiment = bench.experiment(SEEDS)
    bench.run(experiment)
    assert [cell["done"] for cell in dry_run(experiment, bench.settings())["cells"]] == [True, False, True]


def test_a_dry_run_knows_what_would_be_taken_over(bench: Any, capsys: pytest.CaptureFixture[str]):
    experiment = bench.experiment()
    first = experiment.cells[0]
    committed = bench.folder / "results" / "tiny" / "cells" / first.folder
    committed.mkdir(parents=True)
    (committed / "result.json").write_text(json.dumps({"digest": first.digest, "metrics": {}}))
    cells = dry_run(experiment, bench.settings())["cells"]
    assert [(cell["done"], cell["taken_from"]) for cell in cells] == [(True, str(committed)), (False, None)]
    assert [cell["done"] for cell in dry_run(experiment, bench.settings(fresh=True))["cells"]] == [False, False]
    common.conduct(experiment, bench.settings(), dry=True, as_json=False)
    assert f"budget-1, seed 1: done in {committed}" in capsys.readouterr().out
    assert not bench.runs.exists()


def test_a_dry_run_knows_that_own_text_has_changed(
    bench: Any, ran: list[Cell], tmp_path: Path, snapshot: Any, caplog: pytest.LogCaptureFixture
):
    for side in ("de", "en"):
        (tmp_path / f"t.{side}").write_text("".join(f"haus {line}\n" for line in range(12)))
    train = f"{{source: {tmp_path}/t.de, target: {tmp_path}/t.en}}"
    files = f"{{kind: parallel, languages: [de, en], hold_every: 4, train: {train}}}"
    experiment = bench.experiment({}, f"task={{kind: translation, dataset: {files}, tokenizer: word}}")
    settings = Settings(bench.runs, tmp_path / "cache")
    list(run_grid(experiment, settings, "attnbench test"))
    for number in range(2):  # as a real run notes it
        path = bench.cell(experiment, number) / "result.json"
        content = content_sha256(experiment.cells[0].spec.task.data_path(settings.cache))
        path.write_text(json.dumps({**json.loads(path.read_text()), "data": {"content_sha256": content}}))

    def told() -> set[tuple[bool, bool]]:
        return {(cell["done"], cell["data_ready"]) for cell in dry_run(experiment, settings)["cells"]}

    assert told() == {(True, True)}
    (tmp_path / "t.de").write_text("".join(f"hund {line}\n" for line in range(12)))
    before = snapshot(tmp_path)
    assert told() == {(False, False)}
    assert snapshot(tmp_path) == before
    assert caplog.text.count("t.de is not what it was when it was prepared; a run prepares it again") == 1
    assert "a run stops and asks for --fresh" in caplog.text.replace("\n", " ")
    with pytest.raises(AttnbenchError, match="run with --fresh, or under another name"):
        list(run_grid(experiment, settings, "attnbench test"))
    caplog.clear()
    assert told() == {(False, True)}  # that run has prepared the text
    assert "a run stops: " in caplog.text
    caplog.clear()
    settings = replace(settings, fresh=True)
    assert told() == {(False, True)}
    assert not caplog.text
    settings = Settings(bench.runs, tmp_path / "another cache")
    assert told() == {(False, False)}
    assert "a run stops and asks for --fresh" in caplog.text
    (bench.runs / "tiny").rename(bench.runs / "other")
    assert told() == {(False, False)}
    assert "2 cells are done elsewhere, where that was of the same text" in caplog.text


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


def test_a_corpus_is_prepared_by_its_name_or_a_spec(bench: Any):
    (by_spec,) = prepare_named(str(bench.spec()), [], bench.settings())
    assert by_spec["splits"]["train"]["pairs"] == 60
    (by_name,) = prepare_named("demo", ["pairs=60", "held_out=6"], bench.settings())
    assert by_name["path"] == by_spec["path"]
    with pytest.raises(SpecError, match="unknown dataset 'dem'; did you mean 'demo'"):
        prepare_named("dem", [], bench.settings())


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


@pytest.mark.parametrize("gone", [False, True])
def test_results_of_other_text_of_the_same_names_are_not_taken(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: bool
):
    """A spec names own files by their paths: in another folder they may hold anything."""
    seen: list[Cell] = []

    def run_cell(cell: Cell, run: Run, place: Any, listen: Any) -> None:
        seen.append(cell)
        content = content_sha256(cell.spec.task.data_path(place.cache))
        run.finish({"digest": cell.digest, "metrics": {}, "data": {"content_sha256": content}})

    monkeypatch.setattr(executor, "run_cell", run_cell)
    monkeypatch.setattr(logging.getLogger("attnbench"), "propagate", True)
    files = "{kind: parallel, languages: [de, en], hold_every: 4, train: {source: t.de, target: t.en}}"
    task = f"task={{kind: translation, dataset: {files}, tokenizer: word}}"
    for name, word in (("one", "haus"), ("two", "hund")):
        home = tmp_path / name
        home.mkdir()
        monkeypatch.chdir(home)
        for side in ("de", "en"):
            (home / f"t.{side}").write_text("".join(f"{word} {line}\n" for line in range(12)))
        grid = {"axes": {"model.attention.default.budget": [1]}}
        experiment = bench.experiment({"name": name, "grid": grid}, task)
        if gone and name == "two":
            (home / "t.de").unlink()
        list(run_grid(experiment, Settings(bench.runs, home / "cache"), "attnbench test"))
    assert len(seen) == (1 if gone else 2)
    assert ("nothing tells whether it is what this spec means" in caplog.text) == gone
