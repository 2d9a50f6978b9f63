from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from attnbench.experiment import executor
from attnbench.experiment.dry_run import dry_run
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import content_sha256
from attnbench.experiment.run import Run, is_done
from attnbench.experiment.session import run_grid
from attnbench.experiment.settings import Settings
from attnbench.report.collect import collect
from attnbench.report.save import save


def test_results_committed_beside_the_spec_are_done(bench: Any, ran: list[Cell]):
    experiment = bench.experiment()
    first = experiment.cells[0]
    committed = bench.folder / "results" / "tiny" / "cells" / first.folder
    committed.mkdir(parents=True)
    (committed / "result.json").write_text(json.dumps({"digest": first.digest, "metrics": {}}))
    assert [outcome.cell.label for outcome in bench.run(experiment)] == ["budget-inf"]
    assert is_done(bench.runs / "tiny", first)
    assert [cell.status for cell in collect(bench.runs / "tiny").cells] == ["done", "done"]


def test_of_results_that_two_tables_have_a_table_takes_its_own(bench: Any, ran: list[Cell]):
    experiment = bench.experiment()
    first = experiment.cells[0]
    for table, bleu in (("another", 1.0), ("tiny", 2.0)):
        committed = bench.folder / "results" / table / "cells" / first.folder
        committed.mkdir(parents=True)
        content = {"digest": first.digest, "metrics": {"test/bleu": bleu}}
        (committed / "result.json").write_text(json.dumps(content))
    bench.run(experiment)
    assert collect(bench.runs / "tiny").cells[0].metrics == {"test/bleu": 2.0}


def test_the_same_run_in_another_experiment_is_done(bench: Any, ran: list[Cell]):
    bench.run(bench.experiment({"name": "one"}))
    other = bench.experiment({"name": "deep/two", "grid": {"axes": {"model.attention.default.budget": [2, 1]}}})
    assert [outcome.cell.label for outcome in bench.run(other)] == ["budget-2"]


def test_other_tables_are_looked_through_once_for_all_cells(bench: Any, ran: list[Cell], monkeypatch: Any):
    bench.run(bench.experiment({"name": "one"}))
    looked, glob = [], Path.glob

    def watched(self: Path, pattern: str) -> Any:
        looked.append(pattern)
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", watched)
    other = bench.experiment({"name": "two", "grid": {"axes": {"model.attention.default.budget": [2, 4, 1, "inf"]}}})
    dry_run(other, bench.settings())
    assert sum("result.json" in pattern for pattern in looked) == 1
    assert [outcome.cell.label for outcome in bench.run(other)] == ["budget-2", "budget-4"]
    assert sum("result.json" in pattern for pattern in looked) == 2
    assert bench.run(other) == []  # all is done here: nothing is looked for
    assert sum("result.json" in pattern for pattern in looked) == 2


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


def test_results_of_data_that_were_prepared_otherwise_are_told(
    bench: Any, ran: list[Cell], caplog: Any, monkeypatch: Any
):
    """Not taken, and not passed over in silence."""
    monkeypatch.setattr(logging.getLogger("attnbench"), "propagate", True)
    experiment = bench.experiment()
    for cell in experiment.cells:
        committed = bench.folder / "results" / "tiny" / "cells" / cell.folder
        committed.mkdir(parents=True)
        content = {"digest": cell.digest, "metrics": {}, "data": {"content_sha256": "another"}}
        (committed / "result.json").write_text(json.dumps(content))
    told = "done elsewhere, but of other data than are prepared now, and so not taken: 2 of the cells"
    assert [cell["done"] for cell in dry_run(experiment, bench.settings())["cells"]] == [False, False]
    assert caplog.text.count(told) == 1
    bench.run(experiment)
    assert caplog.text.count(told) == 2
    assert len(ran) == 2
    bench.run(experiment)
    bench.run(experiment, fresh=True)
    dry_run(experiment, bench.settings(fresh=True))
    assert caplog.text.count(told) == 2


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
