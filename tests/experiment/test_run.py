from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.errors import AttnbenchError
from attnbench.core.files import parse_yaml, read_jsonl
from attnbench.core.lock import is_locked, locked
from attnbench.experiment.grid import only
from attnbench.experiment.run import TESTS, Run, adopt, environments, is_done, write_grid
from attnbench.experiment.spec import CellSpec
from attnbench.report.significance import FILE


@pytest.fixture
def experiment(bench: Any) -> Any:
    return bench.experiment()


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
    for name in ("checkpoints/.step-2.ab12_9zz/old", "checkpoints/step-1/state.pt", ".result.json.abcdefgh", ".keep"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    for name in ("error.txt", "traceback.txt"):
        (folder / name).write_text("of another time")
    with Run.claim(bench.runs, cell):
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"checkpoints/step-1/state.pt", ".keep", "spec.yaml", "lock"}


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


def fill(folder: Path, digest: str) -> None:
    for name in (
        "spec.yaml",
        "hyps/test.txt",
        "checkpoints/step-1/state.pt",
        "metrics.jsonl",
        "traceback.txt",
        ".x.12345678",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "result.json").write_text(json.dumps({"digest": digest, "metrics": {}}))


@pytest.mark.parametrize("where", ["runs/other", "results", "results/deep/down"])
def test_a_cell_that_is_done_elsewhere_is_taken_over_without_checkpoints(bench: Any, experiment: Any, where: str):
    cell = experiment.cells[0]
    there = bench.folder / where / "cells" / f"another-label-s1-{cell.digest[:8]}"
    fill(there, cell.digest)
    root = bench.runs / "tiny"
    failed = root / "cells" / cell.folder / "error.txt"
    failed.parent.mkdir(parents=True)
    failed.write_text("of another time")
    assert not is_done(root, cell)
    assert adopt(root, cell, [bench.folder / where.split("/")[0]]) == there
    assert is_done(root, cell)
    found = {str(path.relative_to(failed.parent)) for path in failed.parent.rglob("*") if path.is_file()}
    assert found == {"spec.yaml", "hyps/test.txt", "metrics.jsonl", "result.json"}
    assert (failed.parent / "result.json").read_bytes() == (there / "result.json").read_bytes()


def test_tests_that_were_made_beside_a_cell_come_with_it(bench: Any, experiment: Any):
    """The corpus's text, on which they could be made again, is in no committed table."""
    cell, there, root = experiment.cells[0], bench.folder / "results" / "x", bench.runs / "tiny"
    fill(there / "cells" / f"a-s1-{cell.digest[:8]}", cell.digest)
    (there / TESTS).write_text('{"test/bleu:1": 0.5, "test/bleu:2": 0.25}')
    root.mkdir(parents=True)
    (root / TESTS).write_text('{"test/bleu:2": 0.75}')
    adopt(root, cell, [bench.folder / "results"])
    assert json.loads((root / TESTS).read_text()) == {"test/bleu:1": 0.5, "test/bleu:2": 0.75}
    assert TESTS == FILE


def test_what_is_not_that_run_is_not_taken_over(bench: Any, experiment: Any):
    cell = experiment.cells[0]
    there = bench.folder / "results" / "cells"
    fill(there / f"a-s1-{cell.digest[:8]}", cell.digest[:8] + "0000")  # the same name by chance
    fill(there / f"b-s1-{cell.digest[:8]}", cell.digest)
    (there / f"b-s1-{cell.digest[:8]}" / "result.json").write_text('{"digest": ')  # damaged
    fill(there / f"c-s1-{cell.digest[:8]}", cell.digest)
    (there / f"c-s1-{cell.digest[:8]}" / "result.json").unlink()  # not done
    assert adopt(bench.runs, cell, [bench.folder / "results", bench.folder / "absent"]) is None
    assert not (bench.runs / "cells").exists()


def test_a_cell_that_is_being_run_is_not_overwritten(bench: Any, experiment: Any):
    cell = experiment.cells[0]
    fill(bench.folder / "results" / "cells" / f"a-s1-{cell.digest[:8]}", cell.digest)
    with Run.claim(bench.runs, cell):
        assert adopt(bench.runs, cell, [bench.folder / "results"]) is None
    assert not is_done(bench.runs, cell)


def test_a_cell_is_not_taken_from_itself(bench: Any, experiment: Any):
    cell = experiment.cells[0]
    fill(bench.runs / "cells" / cell.folder, cell.digest)
    with locked(bench.folder / "other"):
        assert adopt(bench.runs, cell, [bench.runs]) is None


def test_a_fresh_start_forgets_the_result_first(bench: Any, experiment: Any, monkeypatch: pytest.MonkeyPatch):
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


def test_grid_json_lists_the_cells(bench: Any, experiment: Any):
    write_grid(bench.runs, experiment, "attnbench sweep-k spec.yaml")
    grid = json.loads((bench.runs / "grid.json").read_text())
    first = experiment.cells[0]
    assert {key: grid[key] for key in ("schema_version", "name", "command")} == {
        "schema_version": 1, "name": "tiny", "command": "attnbench sweep-k spec.yaml",
    }  # fmt: skip
    assert grid["source"].endswith("spec.yaml")
    assert grid["table"]["rows"] == "label"
    axes = {"model.attention.default.budget": 1}
    assert grid["cells"][0] == {
        "label": "budget-1", "digest": first.digest, "folder": first.folder, "seed": 1, "axes": axes,
        "row": {"label": "budget-1", **axes},
    }  # fmt: skip
    assert parse_yaml((bench.runs / "spec.yaml").read_text())[0] == experiment.document.raw


def labels(folder: Path) -> list[tuple[str, int]]:
    return [(cell["label"], cell["seed"]) for cell in json.loads((folder / "grid.json").read_text())["cells"]]


def test_a_chosen_cell_joins_the_grid_that_is_there(bench: Any, experiment: Any):
    write_grid(bench.runs, experiment, "attnbench ablate")
    before = (bench.runs / "grid.json").read_bytes(), (bench.runs / "spec.yaml").read_bytes()
    write_grid(bench.runs, only(experiment, "budget-inf"), "attnbench train")
    assert ((bench.runs / "grid.json").read_bytes(), (bench.runs / "spec.yaml").read_bytes()) == before
    another = bench.experiment({"seed": 7})
    write_grid(bench.runs, only(another, "budget-1"), "attnbench train")
    assert labels(bench.runs) == [("budget-1", 1), ("budget-inf", 1), ("budget-1", 7)]
    assert json.loads((bench.runs / "grid.json").read_text())["command"] == "attnbench ablate"
    write_grid(bench.runs, experiment, "attnbench ablate")
    assert (bench.runs / "grid.json").read_bytes() == before[0]  # a whole grid takes the place of the old


def test_a_cell_of_other_settings_takes_the_place_of_its_namesake(
    bench: Any, experiment: Any, caplog: pytest.LogCaptureFixture
):
    write_grid(bench.runs, experiment, "attnbench ablate")
    longer = only(bench.experiment({}, "train.max_steps=9"), "budget-1")
    write_grid(bench.runs, longer, "attnbench train")
    cells = json.loads((bench.runs / "grid.json").read_text())["cells"]
    assert [cell["digest"] for cell in cells] == [longer.cells[0].digest, experiment.cells[1].digest]
    assert f"has other settings than the cell that stood in this table ({experiment.cells[0].folder}" in caplog.text


@pytest.mark.parametrize("old", ["", "[]", '{"cells": [{}]}', '{"cells": 3}'])
def test_a_damaged_grid_is_written_anew(bench: Any, experiment: Any, old: str):
    bench.write(old, "runs/grid.json")
    write_grid(bench.runs, only(experiment, "budget-1"), "attnbench train")
    assert labels(bench.runs) == [("budget-1", 1)]


def test_the_seeds_of_a_row_are_of_one_system(bench: Any, experiment: Any, caplog: pytest.LogCaptureFixture):
    with Run.claim(bench.runs, experiment.cells[0]):
        write_grid(bench.runs, experiment, "attnbench ablate")
    write_grid(bench.runs, only(bench.experiment({"seed": 3}), "budget-1"), "attnbench train")
    assert labels(bench.runs) == [("budget-1", 1), ("budget-inf", 1), ("budget-1", 3)]
    write_grid(bench.runs, only(bench.experiment({"seed": 4}, "train.max_steps=9"), "budget-1"), "attnbench train")
    assert labels(bench.runs) == [("budget-inf", 1), ("budget-1", 3), ("budget-1", 4)]  # 3 has not said anything yet
    assert "[budget-1, seed 1] leaves this table, it has other settings than this command" in caplog.text
    assert (bench.runs / "cells" / experiment.cells[0].folder).is_dir()
