"""`attnbench train`: one cell, from nothing to its result, and not twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbench.core.files import read_jsonl

CELL = ("--cell", "budget-2")


def test_a_cell_is_trained_and_scored(invoke, tiny, tree):
    result = invoke("train", *CELL, *tiny)
    (cell,) = Path("runs/demo/cells").iterdir()
    assert cell.name.startswith("budget-2-s1-")
    files = set(tree(cell))
    wanted = {"spec.yaml", "env.json", "metrics.jsonl", "result.json", "hyps/test.txt", "hyps/test.ref.txt"}
    assert wanted <= files
    assert any(name.startswith("checkpoints/step-4/") for name in files)
    found = json.loads((cell / "result.json").read_text())
    assert found["status"] == "done"
    assert found["metrics"]["train/steps"] == 4
    assert found["metrics"]["attended/cross"] <= 2
    assert {"valid/bleu", "test/bleu", "test/chrf", "valid/loss", "train/tokens_per_s"} <= set(found["metrics"])
    assert [line["step"] for line in read_jsonl(cell / "metrics.jsonl") if "train/loss" in line] == [1, 2, 3, 4]
    for name in ("results.json", "results.csv", "results.md", "results.tex"):
        assert (Path("runs/demo") / name).is_file()
    assert "BLEU" in result.stdout.upper()
    assert "evaluating" in result.stderr
    assert "evaluating" not in result.stdout


def test_what_is_done_is_not_done_again(invoke, tiny, tree):
    first = invoke("train", *CELL, *tiny)
    before = tree(Path("runs/demo/cells"))
    second = invoke("train", *CELL, *tiny)
    assert tree(Path("runs/demo/cells")) == before
    assert second.stdout == first.stdout
    assert "1 of 1 cells are done already" in second.stderr
    fresh = invoke("train", *CELL, *tiny, "--fresh")
    assert "evaluating" in fresh.stderr
    assert set(tree(Path("runs/demo/cells"))) == set(before)


def test_another_seed_is_another_cell(invoke, tiny):
    invoke("train", *CELL, *tiny, "--seed", 7)
    (cell,) = Path("runs/demo/cells").iterdir()
    assert "-s7-" in cell.name
    assert json.loads((cell / "result.json").read_text())["seed"] == 7


def test_json_is_one_document(invoke, tiny):
    result = invoke("train", *CELL, *tiny, "--json")
    document = json.loads(result.stdout)
    assert document["name"] == "demo"
    assert "evaluating" in result.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dry_run_tells_all_and_writes_nothing(invoke, tiny, tree, tmp_path, monkeypatch, as_json):
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    result = invoke("train", *CELL, *tiny, "--dry-run", *(["--json"] if as_json else []))
    assert tree(tmp_path) == {}
    assert not list(tmp_path.iterdir())
    if as_json:
        plan = json.loads(result.stdout)
        (cell,) = plan["cells"]
        assert plan["spec"]["model"]["width"] == 8
        assert cell["label"] == "budget-2"
        assert not cell["done"]
        assert not cell["data_ready"]
        # tables 128 and 288 rows; an encoder and a decoder layer; two last norms (the demo is pre-norm)
        attention, feed_forward, norm = 4 * (8 * 8 + 8), 2 * 8 * 8 + 8 + 8, 2 * 8
        layers = (attention + feed_forward + 2 * norm) + (2 * attention + feed_forward + 3 * norm)
        assert cell["parameters"] == (128 + 288) * 8 + layers + 2 * norm
    else:
        assert "width: 8" in result.stdout
        assert "nothing was written" in result.stdout
        assert "data to fetch" not in result.stdout  # it is generated


def test_a_dry_run_says_what_is_to_be_fetched(invoke, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "s.yaml").write_text("name: s\ntask: {kind: translation, dataset: multi30k-de-en}\n")
    told = invoke("train", tmp_path / "s.yaml", "--dry-run").stdout
    assert "data to fetch: Multi30k, task 1 (test_2016_flickr), 1 MB, from https://raw.githubusercontent.com/" in told
    assert "licence: CC BY-NC-SA 4.0. `attnbench prepare multi30k-de-en --from DIR`" in told


def test_a_dry_run_knows_what_is_done(invoke, tiny):
    invoke("train", *CELL, *tiny)
    (cell,) = json.loads(invoke("train", *CELL, *tiny, "--dry-run", "--json").stdout)["cells"]
    assert cell["done"]
    assert cell["data_ready"]


def test_a_grid_of_several_cells_asks_which(invoke, tiny):
    result = invoke("train", *tiny, code=2)
    assert "choose one with --cell (budget-1, budget-2, budget-4, budget-inf)" in result.stderr
    result = invoke("train", *tiny, "--cell", "budget-3", code=2)
    assert "--cell budget-3: unknown cell 'budget-3'; did you mean" in result.stderr
    assert not Path("runs").exists()


def test_a_spec_file_and_another_runs_folder(invoke, tiny, tmp_path):
    Path("mine.yaml").write_text(
        "name: group/mine\ntask: {kind: translation, dataset: demo}\nmodel: {tie: decoder, kind: transformer}\n"
    )
    invoke("train", "mine.yaml", *tiny, "--runs", tmp_path / "elsewhere")
    (cell,) = (tmp_path / "elsewhere/group/mine/cells").iterdir()
    assert cell.name.startswith("run-s1-")
    assert not Path("runs").exists()


def test_a_divergence_is_an_outcome_that_the_table_tells(invoke, tiny):
    """A learning rate that breaks every number."""
    broken = [*CELL, *tiny, "--set", "train.schedule={kind: inverse_sqrt, lr: 1e30, warmup: 1}"]
    result = invoke("train", *broken)
    (cell,) = Path("runs/demo/cells").iterdir()
    assert not (cell / "error.txt").exists()
    found = json.loads((cell / "result.json").read_text())
    assert found["outcome"]["kind"] == "diverged"
    assert "test/bleu" not in found["metrics"]
    assert "diverged at step" in result.stderr
    assert "budget-2, seed 1: diverged at step" in result.stdout
    assert "no scores" in result.stdout
    assert "are done already" in invoke("train", *broken).stderr
    refused = invoke("eval", cell, code=4).stderr
    assert "there are no checkpoints; the training diverged at step" in refused
    assert "train it again at a lower rate" in refused


def test_a_cell_that_fails_is_kept_and_the_exit_code_says_so(invoke, tiny):
    """Sentences that the model cannot read."""
    broken = [*CELL, *tiny, "--set", "model.max_length=2"]
    result = invoke("train", *broken, code=1)
    (cell,) = Path("runs/demo/cells").iterdir()
    assert not (cell / "result.json").exists()
    assert "raise model.max_length" in (cell / "error.txt").read_text()
    assert "failed: the longest pair" in result.stderr
    assert "failed" in result.stdout
    assert json.loads(invoke("train", *broken, "--json", code=1).stdout)["name"] == "demo"


def test_a_packaged_spec_goes_by_its_name(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "nothing was written" in invoke("train", "demo", "--cell", "budget-inf", "--dry-run").stdout
    (tmp_path / "demo").write_text("name: mine\ntask: {kind: copying, dataset: copy}\nmodel: lstm\n")
    assert "runs/mine" in invoke("train", "demo", "--dry-run").stdout  # a file of one's own goes first


def test_a_fault_of_the_code_names_its_traceback(invoke, tiny, tmp_path, monkeypatch):
    def fail(*given, **named):
        raise RuntimeError("my bug")

    monkeypatch.setattr("attnbench.experiment.executor.run_cell", fail)
    told = invoke("train", *CELL, *tiny, code=1).stderr
    (kept,) = (tmp_path / "runs").rglob("traceback.txt")
    assert f"failed: RuntimeError: my bug (traceback: {kept.relative_to(tmp_path)})" in told
    assert "in fail" in kept.read_text()
