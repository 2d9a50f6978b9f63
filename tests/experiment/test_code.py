"""Results know the files of the mechanisms that they were made with."""

from __future__ import annotations

import json
import logging
from typing import Any

from attnbench.experiment.code import changed_mechanisms, mechanism_files
from attnbench.experiment.dry_run import dry_run

TRANSFORM = "attnbench.attention.transforms.topk"


def test_the_files_of_what_a_cell_is_made_of(bench: Any):
    files = mechanism_files(bench.experiment().cells[0].spec)
    assert {TRANSFORM, "attnbench.models.transformer"} <= set(files)
    assert "attnbench.attention.transforms.sparsemax" not in files
    assert all(len(hash) == 12 for hash in files.values())


def test_only_what_is_known_of_both_is_compared(bench: Any):
    spec = bench.experiment().cells[0].spec
    files = mechanism_files(spec)
    assert changed_mechanisms(spec, {}) == changed_mechanisms(spec, {"mechanisms": files}) == []
    assert changed_mechanisms(spec, {"mechanisms": {**files, TRANSFORM: "0", "gone": "1"}}) == [TRANSFORM]


def test_done_cells_of_other_code_are_told(bench: Any, caplog: Any):
    experiment = bench.experiment()
    bench.run(experiment)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert bench.run(experiment) == []
    assert "changed since" not in caplog.text
    path = bench.cell(experiment) / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "mechanisms": {**result["mechanisms"], TRANSFORM: "0"}}))
    said = f"{TRANSFORM} has changed since 1 of the cells that are done was made"
    for look in (lambda: bench.run(experiment), lambda: dry_run(experiment, bench.settings())):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            look()
        assert caplog.text.count(said) == 1
        assert "--fresh" in caplog.text
