"""Cells whose attention spends fertilities, from alignments to the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.core.errors import AttnbenchError
from attnbench.core.files import read_jsonl
from attnbench.data.alignment.model import Aligner
from attnbench.experiment.evaluation import load_trained, score_split, translate
from attnbench.experiment.pipeline import Place, count_parameters, run_cell
from attnbench.experiment.run import Run
from attnbench.models.fertility.guided import GuidedFertility
from attnbench.models.fertility.predicted import PredictedFertility
from attnbench.tasks import pairs

TAGGER = {"kind": "predicted", "layers": 1, "embedding": 8, "width": 8, "epochs": 1}


def experiment(bench: Any, fertility: Any, transform: str = "csparsemax", **changes: Any) -> Any:
    model = {
        "label": "lstm", "kind": "lstm", "layers": 1, "width": 8, "fertility": fertility,
        "attention": {"cross": {"transform": transform, "bias": "exhaustion"}},
    }  # fmt: skip
    return bench.experiment({**changes, "grid": {"axes": {"model": [model]}}})


def finish(bench: Any, given: Any) -> tuple[Path, dict[str, Any]]:
    cell = given.cells[0]
    with Run.claim(bench.runs / given.name, cell) as run:
        run_cell(cell, run, Place(bench.cache), lambda record: None)
    return run.folder, json.loads((run.folder / "result.json").read_text())


def test_guided_cells_learn_a_table_that_comes_back(bench: Any):
    folder, result = finish(bench, experiment(bench, "guided"))
    trained = load_trained(folder, [], bench.cache, device="cpu", step=None)
    assert isinstance(trained.model.fertility, GuidedFertility)
    table = trained.model.fertility.table
    assert table.max() > 1
    assert result["metrics"]["fertility/mean"] == pytest.approx(table.mean().item())
    assert score_split(trained, "test").values["bleu"] == pytest.approx(result["metrics"]["test/bleu"])
    assert len(translate(trained, ["x y"])) == 1


def test_predicted_cells_tell_how_well_their_tagger_learned(bench: Any):
    given = experiment(bench, {**TAGGER, "epochs": 10, "rate": 0.03})
    _, result = finish(bench, given)
    assert 0 <= result["metrics"]["fertility/f1"] <= 1
    assert 0 < result["metrics"]["fertility/accuracy"] <= 1
    plain = experiment(bench, {"kind": "constant", "value": 2})
    assert result["metrics"]["params"] == count_parameters(given.cells[0].spec) == count_parameters(plain.cells[0].spec)


def test_a_tagger_that_was_trained_is_not_taught_again_to_be_scored(bench: Any):
    folder, _ = finish(bench, experiment(bench, {**TAGGER, "epochs": 3, "rate": 0.03}, seed=3))
    trained = load_trained(folder, [], bench.cache, device="cpu", step=None)
    tagger = trained.model.fertility
    assert isinstance(tagger, PredictedFertility)
    before = {name: tensor.clone() for name, tensor in tagger.state_dict().items()}
    score_split(trained, "test")
    assert all(torch.equal(before[name], tensor) for name, tensor in tagger.state_dict().items())


def test_actual_cells_ask_the_references_of_every_split_and_are_timed(bench: Any, monkeypatch: pytest.MonkeyPatch):
    folder, result = finish(bench, experiment(bench, "actual", timing={"decode_runs": 1}))
    assert {"valid/bleu", "test/bleu", "decode/seconds"} <= set(result["metrics"])
    trained = load_trained(folder, [], bench.cache, device="cpu", step=None)
    assert score_split(trained, "valid").values["bleu"] == pytest.approx(result["metrics"]["valid/bleu"])
    monkeypatch.setattr(pairs, "with_fertilities", lambda data: pytest.fail("aligned a corpus that nobody asked about"))
    other = load_trained(folder, [], bench.cache, device="cpu", step=None)
    with pytest.raises(AttnbenchError, match="oracle"):
        translate(other, ["x y"])


@pytest.mark.parametrize("fertility", ["guided", TAGGER], ids=["guided", "predicted"])
def test_what_was_learned_is_not_learned_again(bench: Any, fertility: Any, monkeypatch: pytest.MonkeyPatch):
    """It is kept for cells alike; and one that goes on after its first checkpoint ends as if it was never stopped."""
    whole, _ = finish(bench, experiment(bench, fertility))
    wanted = load_trained(whole, [], bench.cache, device="cpu", step=None).model.state_dict()
    learned = []
    for kind in (GuidedFertility, PredictedFertility):
        learn = kind.learn
        monkeypatch.setattr(
            kind, "learn", lambda self, *given, learn=learn: (learned.append(1), learn(self, *given))[1]
        )
    bench.runs = bench.folder / "again"
    given = experiment(bench, fertility)
    folder, _ = finish(bench, given)
    assert learned == []
    data = given.cells[0].spec.task.data_path(bench.cache)
    for path in data.glob("lessons-*.safetensors"):
        path.unlink()
    bench.runs = bench.folder / "once more"
    folder, _ = finish(bench, given)
    assert len(learned) == 1
    (folder / "result.json").unlink()
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    assert newest.name == "step-4"
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink()
    newest.rmdir()
    finish(bench, given)
    assert len(learned) == 1
    found = load_trained(folder, [], bench.cache, device="cpu", step=None).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("transform", ["csoftmax", "csparsemax"])
def test_a_training_that_diverges_is_told_as_such(bench: Any, transform: str):
    changes = {"train": {"schedule": {"kind": "constant", "lr": 1e38}, "precision": "fp32"}}
    folder, result = finish(bench, experiment(bench, {"kind": "constant", "value": 2}, transform, **changes))
    assert result["outcome"]["kind"] == "diverged"
    assert read_jsonl(folder / "metrics.jsonl")


def test_drop_is_measured_in_the_end_alone(bench: Any, monkeypatch: pytest.MonkeyPatch):
    aligned = []
    align = Aligner.align
    monkeypatch.setattr(Aligner, "align", lambda self, *given: (aligned.append(1), align(self, *given))[1])
    changes = {"task": {"drop": True}, "train": {"validate_bleu": True}}
    folder, result = finish(bench, experiment(bench, {"kind": "constant", "value": 2}, **changes))
    assert {"valid/drop", "test/drop"} <= set(result["metrics"])
    assert len(aligned) == 4  # outputs and references of two splits
    assert "valid/bleu" in next(line for line in read_jsonl(folder / "metrics.jsonl") if "valid/loss" in line)
    assert (folder / "hyps" / "test.drop.txt").is_file()
