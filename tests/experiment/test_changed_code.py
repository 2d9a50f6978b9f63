"""Results know the files that they were made with, and say when those have changed."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from attnbench.core import provenance
from attnbench.experiment import pipeline
from attnbench.experiment.dry_run import dry_run

TRANSFORM = "attnbench.attention.transforms.topk"


def edited(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that begins after somebody has changed topk.py."""
    whole = provenance._hash
    monkeypatch.setattr(
        provenance, "_hash", lambda path: "0" * 12 if path.endswith("transforms/topk.py") else whole(path)
    )


def test_done_cells_of_other_code_are_told(bench: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch):
    experiment = bench.experiment()
    bench.run(experiment)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert bench.run(experiment) == []
    assert "changed since" not in caplog.text
    edited(monkeypatch)
    said = f"{TRANSFORM} has changed since 1 of the cells that are done was made"  # the other one is softmax
    for look in (lambda: bench.run(experiment), lambda: dry_run(experiment, bench.settings())):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            look()
        assert caplog.text.count(said) == 1
        assert "--fresh" in caplog.text


def test_a_training_that_goes_on_in_other_code_says_so_and_keeps_what_it_began_with(
    bench: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
):
    experiment = bench.experiment({"grid": {"axes": {"model.attention.default.budget": [1]}}})
    bench.run(experiment)
    path = bench.cell(experiment) / "result.json"
    began = json.loads(path.read_text())["mechanisms"]
    path.unlink()  # killed before its end
    edited(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert [outcome.error for outcome in bench.run(experiment)] == [None]
    assert f"{TRANSFORM} has changed since this training began" in caplog.text
    assert json.loads(path.read_text())["mechanisms"] == began


def test_a_note_without_files_gets_none_later(bench: Any):
    """Of a training that began before they were noted: its code is not known."""
    experiment = bench.experiment({"grid": {"axes": {"model.attention.default.budget": [1]}}})
    bench.run(experiment)
    cell = bench.cell(experiment)
    note = pipeline._data_note(cell)
    note.write_text(json.dumps({"content_sha256": json.loads(note.read_text())["content_sha256"]}))
    (cell / "result.json").unlink()
    bench.run(experiment)
    assert set(json.loads((cell / "result.json").read_text())["mechanisms"]) == {"attnbench.search.greedy"}
