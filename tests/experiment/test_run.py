from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.errors import AttnbenchError
from attnbench.core.files import parse_yaml, read_jsonl
from attnbench.core.lock import is_locked
from attnbench.experiment.run import Run, environments
from attnbench.experiment.spec import CellSpec


def test_a_claimed_cell_is_nobody_elses(bench: Any, experiment: Any):
    cell = experiment.cells[0]
    with Run.claim(bench.runs, cell) as run:
        assert run.folder == bench.runs / "cells" / cell.folder
        with (
            pytest.raises(AttnbenchError, match=r"is held by .*being run there; wait for it"),
            Run.claim(bench.runs, cell),
        ):
            raise AssertionError
        with Run.claim(bench.runs, experiment.cells[1]):
            pass
    assert not is_locked(run.folder / "lock")
    with Run.claim(bench.runs, cell):
        pass


def test_a_file_in_the_place_of_a_cell_is_told(bench: Any, experiment: Any):
    folder = bench.runs / "cells" / experiment.cells[0].folder
    folder.parent.mkdir(parents=True)
    folder.write_text("mine")
    with (
        pytest.raises(AttnbenchError, match=f"{folder} is a file where the cell's folder belongs; move it away"),
        Run.claim(bench.runs, experiment.cells[0]),
    ):
        raise AssertionError
    assert folder.read_text() == "mine"


def test_the_resolved_spec_is_kept(bench: Any, experiment: Any):
    cell = experiment.cells[0]
    with Run.claim(bench.runs, cell) as run:
        pass
    raw, _ = parse_yaml((run.folder / "spec.yaml").read_text())
    assert raw["model"]["width"] == 16
    assert CellSpec.model_validate(raw).digest() == cell.digest


def test_a_claim_clears_what_a_killed_process_left(bench: Any, experiment: Any):
    cell = experiment.cells[0]
    folder = bench.runs / "cells" / cell.folder
    mark = "01234567~"
    for name in (
        f"checkpoints/.step-2.{mark}/old", "checkpoints/step-1/state.pt", f".result.json.{mark}", ".notes.markdown",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    for name in ("error.txt", "traceback.txt"):
        (folder / name).write_text("of another time")
    with Run.claim(bench.runs, cell):
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"checkpoints/step-1/state.pt", ".notes.markdown", "spec.yaml", "lock"}


def test_the_log_is_rewound_whole(bench: Any, experiment: Any, monkeypatch: pytest.MonkeyPatch):
    with Run.claim(bench.runs, experiment.cells[0]) as run:
        for step in (1, 2, 2, 3):
            run.log({"step": step})
        run.log({"event": "x"})
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "cut')
        run.rewind(2)
        assert read_jsonl(run.folder / "metrics.jsonl") == [{"step": 1}, {"step": 2}, {"step": 2}, {"event": "x"}]

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("attnbench.core.files.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run.rewind(0)
        assert len(read_jsonl(run.folder / "metrics.jsonl")) == 4


def test_a_failure_is_kept_without_places_of_this_machine(bench: Any, experiment: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(bench.folder)
    with Run.claim(bench.runs, experiment.cells[0]) as run:
        run.fail(f"{bench.folder}/runs/x: broken; see {Path.home()}/.cache/y\n", f"Traceback\n  {bench.folder}/x.py\n")
        assert (run.folder / "error.txt").read_text() == "runs/x: broken; see ~/.cache/y\n"
        assert (run.folder / "traceback.txt").read_text().startswith("Traceback")
        run.fail("again")
    assert not (run.folder / "result.json").exists()


def test_every_environment_that_left_steps_is_kept(bench: Any, experiment: Any):
    with Run.claim(bench.runs, experiment.cells[0]) as run:
        path = run.folder / "env.json"
        path.write_text('{"commit": "old", "threads": 1}')  # as it was written before there were attempts
        run.environment({"commit": "two"}, 50)
        run.environment({"commit": "lost"}, 80)
        assert run.environment({"commit": "three"}, 80) == environments(path)
        assert environments(path) == [
            {"from_step": 0, "commit": "old", "threads": 1},
            {"from_step": 50, "commit": "two"},
            {"from_step": 80, "commit": "three"},
        ]
        assert json.loads(path.read_text()) == {"attempts": environments(path)}
        run.environment({"commit": "anew"}, 0)
        assert environments(path) == [{"from_step": 0, "commit": "anew"}]


def test_a_fresh_start_that_is_cut_off_leaves_no_checkpoints_without_their_log(
    bench: Any, experiment: Any, fill: Any, monkeypatch: pytest.MonkeyPatch
):
    with Run.claim(bench.runs, experiment.cells[0]) as run:
        fill(run.folder, "x")
        run.log({"step": 1})
        with monkeypatch.context() as patch:
            patch.setattr("attnbench.experiment.run.remove_folder", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run.fresh()
        assert run.checkpoints.exists()
        assert (run.folder / "metrics.jsonl").exists()


def test_a_fresh_start_forgets_the_result_first(
    bench: Any, experiment: Any, fill: Any, monkeypatch: pytest.MonkeyPatch
):
    with Run.claim(bench.runs, experiment.cells[0]) as run:
        fill(run.folder, "x")
        with monkeypatch.context() as patch:
            patch.setattr("attnbench.experiment.run.remove_folder", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run.fresh()
        assert not (run.folder / "result.json").exists()
        run.fresh()
        assert sorted(path.name for path in run.folder.iterdir()) == [
            ".x.12345678",
            "lock",
            "spec.yaml",
            "traceback.txt",
        ]
