from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.files import parse_yaml
from attnbench.experiment.grid import only
from attnbench.experiment.grid_file import write_grid
from attnbench.experiment.run import Run


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
