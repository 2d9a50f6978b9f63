"""Status, reasons and damage: what a run folder's files say."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from attnbench.core.errors import AttnbenchError, DataError
from attnbench.core.lock import locked
from attnbench.report.collect import collect


def test_statuses_come_from_files(run_folder):
    run = run_folder()
    run.add("done", 1, 30.0)
    for label, file in (("failed", "error.txt"), ("interrupted", "checkpoints/step-10/state.pt")):
        path = run.add(label) / file
        path.parent.mkdir(parents=True)
        path.write_text("out of memory: make train.tokens smaller\nand more lines\n")
    run.add("queued")
    experiment = collect(run.grid())
    assert {cell.label: cell.status for cell in experiment.cells} == {
        "done": "done",
        "failed": "failed",
        "interrupted": "interrupted",
        "queued": "queued",
    }
    assert experiment.cells[1].reason == "out of memory: make train.tokens smaller"
    assert experiment.title == "demo"


def test_a_held_lock_means_running_and_a_dead_one_does_not(run_folder):
    run = run_folder()
    folder = run.add("a")
    with locked(folder / "lock"):
        assert collect(run.grid()).cells[0].status == "running"
    (folder / "lock").write_text("left behind")
    assert collect(run.grid()).cells[0].status == "queued"


def test_the_files_of_a_done_cell_are_read(sweep):
    cell = collect(sweep.grid()).cells[0]
    assert (cell.label, cell.seed, cell.status) == ("dense", 1, "done")
    assert cell.metrics["test/bleu"] == 35.0
    assert cell.signatures["test/bleu"].startswith("nrefs:1|case:lc")
    assert cell.samples == {"test": 3, "attended": 256}
    assert cell.data["folder"] == "corpus/aaaaaaaaaaaa"
    assert cell.spec["model"]["kind"] == "lstm"
    assert [attempt["device"] for attempt in cell.attempts] == ["cpu"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "damaged"),
        ('{"metrics": {"test/bl', "damaged"),
        ("[1, 2]", "damaged"),
        ('{"schema_version": 1}', "no metrics"),
        ('{"digest": "other", "metrics": {}}', "another spec"),
        ('{"metrics": {}, "signatures": ["x"]}', "'list' object"),
    ],
)
def test_a_damaged_result_is_a_failed_cell(run_folder, content: str, reason: str):
    run = run_folder()
    (run.add("a", 1, 30.0) / "result.json").write_text(content)
    run.add("b", 1, 31.0)
    first, second = collect(run.grid()).cells
    assert first.status == "failed"
    assert reason in first.reason
    assert second.status == "done"


def test_what_is_no_number_is_no_metric(run_folder):
    """A truth value passes for one in Python, and a table would show it as 1.00."""
    run = run_folder()
    run.add("a", 1, 30.0, metrics={"test/chrf": 50, "test/cut": True, "test/name": "x", "test/none": None})
    (cell,) = collect(run.grid()).cells
    assert cell.metrics == {"test/bleu": 30.0, "test/chrf": 50.0}


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Files of a name may not be read, by whomever."""
    usual = Path.read_bytes

    def make(name: str) -> None:
        def read(path: Path) -> bytes:
            if path.name == name:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return usual(path)

        monkeypatch.setattr(Path, "read_bytes", read)

    return make


def test_a_result_that_may_not_be_read_is_not_called_damaged(run_folder, refuse):
    """Who deleted it, as for a damaged one, would lose what is whole."""
    run = run_folder()
    run.add("a", 1, 30.0)
    grid = run.grid()
    refuse("result.json")
    (cell,) = collect(grid).cells
    assert cell.status == "failed"
    assert cell.reason == "result.json cannot be read (Permission denied): check its permissions"


def test_a_grid_that_may_not_be_read_is_not_to_be_made_again(run_folder, refuse):
    grid = run_folder().grid()
    refuse("grid.json")
    with pytest.raises(
        AttnbenchError, match=r"/grid\.json cannot be read \(Permission denied\): check its permissions$"
    ):
        collect(grid)


def test_damaged_side_files_cost_nothing_but_themselves(run_folder):
    run = run_folder()
    folder = run.add("a", 1, 30.0)
    (folder / "spec.yaml").write_text("a: [1,\n")
    (folder / "env.json").write_text("{")
    (cell,) = collect(run.grid()).cells
    assert (cell.status, cell.spec, cell.attempts) == ("done", {}, ())


def test_every_attempt_at_a_cell_is_read(run_folder):
    run = run_folder()
    folder = run.add("a", 1, 30.0)
    attempts = [{"from_step": 0, "device": "cpu"}, {"from_step": 50, "device": "cuda"}]
    (folder / "env.json").write_text(json.dumps({"attempts": attempts}))
    (cell,) = collect(run.grid()).cells
    assert list(cell.attempts) == attempts


def test_no_run_folder_names_those_below(run_folder, tmp_path: Path):
    run_folder("runs/one").grid()
    with pytest.raises(DataError, match=r"no grid\.json; run folders below it: .*runs/one"):
        collect(tmp_path / "runs")
    with pytest.raises(DataError, match="no such folder"):
        collect(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"grid\.json is no run folder.* \(it is a file; name a folder\)"):
        collect(tmp_path / "runs" / "one" / "grid.json")


def test_a_file_in_the_place_of_a_cell_is_told(run_folder):
    run = run_folder()
    run.add("a", 1, 30.0)
    run.add("b").touch()
    first, second = collect(run.grid()).cells
    assert (first.status, second.status) == ("done", "failed")
    assert second.reason == "cells/b-s1 is a file where the cell's folder belongs; move it away"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"name": "x"}',
        '{"name": "x", "cells": [{}]}',
        '{"name": "x", "cells": 3}',
        '{"cells": [], "name": 1, "table": 2}',
    ],
)
def test_a_damaged_grid_is_a_clear_error(tmp_path: Path, content: str):
    (tmp_path / "grid.json").write_text(content)
    with pytest.raises(AttnbenchError, match=r"grid\.json is damaged.*: run the command that made it again"):
        collect(tmp_path)


def test_numbers_that_are_not_finite_are_read(run_folder):
    run = run_folder()
    folder = run.add("a", 1, 30.0)
    result = json.loads((folder / "result.json").read_text())
    result["metrics"]["valid/ppl"] = float("inf")
    result["metrics"]["note"] = "no number"
    (folder / "result.json").write_text(json.dumps(result))
    (cell,) = collect(run.grid()).cells
    assert cell.metrics == {"test/bleu": 30.0, "valid/ppl": float("inf")}
