"""`attnbench copy-task`: from a spec to the table and the curves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

TINY = [word for path, value in {
    "task.dataset": "{kind: copy, symbols: 4, longest: 3, pairs: 60, held_out: 6}", "model.width": 8, "model.layers": 1,
    "model.heads": 2, "model.ffn": 8, "train.max_epochs": 2, "train.batch_tokens": 60, "train.train_bleu": 6,
    "grid.axes.cell": "[{label: Small, model: {kind: transformer, width: 8}}, {label: Wide, model: {width: 16}}]",
}.items() for word in ("--set", f"{path}={value}")]  # fmt: skip


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "runs"


@pytest.fixture
def finished(invoke, empty_folder: None, kept: Path) -> None:
    """Trained models, which are trained once, and copied."""
    if not kept.exists():
        invoke("copy-task", *TINY)
        shutil.copytree("runs", kept)
    shutil.copytree(kept, "runs", dirs_exist_ok=True)


def test_without_a_spec_it_ends_in_the_papers_table(invoke, finished):
    result = invoke("copy-task", *TINY)
    for heading in ("valid BLEU", "valid exact match", "s/epoch", "best", "epoch", "parameters"):
        assert heading in result.stdout, heading
    assert "Small" in result.stdout
    assert "Wide" in result.stdout
    text = Path("runs/copy/results.md").read_text()
    assert "| label | valid BLEU | valid exact match |" in text
    assert "train s/epoch | best epoch | train epochs | parameters |" in text


def test_the_curves_are_json_lines(invoke, finished):
    content = json.loads(invoke("copy-task", *TINY, "--json").stdout)
    assert set(content["results"]) == {"Small", "Wide"}
    for cell in Path("runs/copy/cells").iterdir():
        lines = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
        curve = [line for line in lines if "epoch/seconds" in line]
        assert [line["epoch"] for line in curve] == [1, 2]
        for side in ("train", "valid"):
            assert {f"epoch/{side}_loss", f"epoch/{side}_ppl", f"epoch/{side}_bleu"} <= set(curve[0])
        metrics = json.loads((cell / "result.json").read_text())["metrics"]
        assert {"valid/exact", "train/seconds_per_epoch", "best/epoch", "params"} <= set(metrics)


def test_a_spec_of_ones_own_with_seeds(invoke):
    Path("mine.yaml").write_text(
        "name: mine\ntask: {kind: copying, dataset: copy}\ngrid: {axes: {model: [{label: a, kind: transformer}]}}\n"
    )
    plan = json.loads(invoke("copy-task", "mine.yaml", "--seeds", "4,2", "--dry-run", "--json").stdout)
    assert [(cell["label"], cell["seed"]) for cell in plan["cells"]] == [("a", 4), ("a", 2)]
    assert not Path("runs").exists()


def test_finished_models_are_kept(invoke, finished):
    assert "2 of 2 cells are done already" in invoke("copy-task", *TINY).stderr


def test_another_task_is_refused(invoke):
    Path("mine.yaml").write_text(
        "name: mine\ntask: {kind: translation, dataset: demo}\nmodel: {kind: transformer, tie: decoder}\n"
    )
    result = invoke("copy-task", "mine.yaml", "--dry-run", code=2)
    assert "mine.yaml:2: 'run' is of the task 'translation'" in result.stderr
    assert "attnbench ablate" in result.stderr
