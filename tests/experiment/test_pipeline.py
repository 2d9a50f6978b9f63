from __future__ import annotations

import hashlib
import json
import math
import shutil
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import attnbench
from attnbench.core.contention import Shared
from attnbench.core.errors import AttnbenchError, DataError
from attnbench.core.files import read_jsonl
from attnbench.experiment import pipeline
from attnbench.experiment.environment import environment
from attnbench.experiment.grid_file import write_grid
from attnbench.experiment.pipeline import Place, build_model, content_sha256, count_parameters, run_cell
from attnbench.experiment.run import Run, environments
from attnbench.report.collect import collect
from attnbench.train import runtime as runtime_module
from attnbench.train.runtime import Runtime
from attnbench.train.state import load_average, load_weights, weights_path


def finish(bench: Any, experiment: Any) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """Run the first cell: its folder, its result as written, and what a listener heard."""
    heard: list[dict[str, Any]] = []
    cell = experiment.cells[0]
    with Run.claim(bench.runs / experiment.name, cell) as run:
        run_cell(cell, run, Place(bench.cache), lambda record: heard.append(dict(record)))
    return run.folder, json.loads((run.folder / "result.json").read_text()), heard


METRICS = """
valid/loss valid/ppl valid/bleu valid/bleu_13a valid/chrf test/bleu test/bleu_13a test/chrf valid/rep test/rep
attended/encoder_self
attended/decoder_self attended/cross entropy/encoder_self entropy/decoder_self entropy/cross train/tokens_per_s
decode/tokens_per_s train/seconds train/steps train/tokens train/epochs best/step
best/epoch params
"""


def test_a_result_says_what_tables_need(bench: Any):
    before = datetime.now(UTC) - timedelta(seconds=1)
    experiment = bench.experiment()
    folder, result, _ = finish(bench, experiment)
    cell = experiment.cells[0]
    assert set(METRICS.split()) <= set(result["metrics"])
    assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in result["metrics"].values())
    assert {name: result[name] for name in ("schema_version", "status", "digest", "label", "seed")} == {
        "schema_version": 1, "status": "done", "digest": cell.digest, "label": "budget-1", "seed": 1,
    }  # fmt: skip
    assert result["metrics"]["train/epochs"] == read_jsonl(folder / "metrics.jsonl")[-1]["epoch"] == 0
    assert result["outcome"] == {
        "kind": "finished", "step": 4, "epoch": 1, "text": "finished at step 4", "seen": "",
    }  # fmt: skip
    assert result["samples"] == {"valid": 6, "test": 6, "attended": 6}
    assert result["references"] == {
        split: hashlib.sha256((folder / "hyps" / f"{split}.ref.txt").read_bytes().removesuffix(b"\n")).hexdigest()
        for split in ("valid", "test")
    }
    assert set(result["signatures"]) == {
        f"{split}/{name}" for split in ("valid", "test") for name in ("bleu", "bleu_13a", "chrf", "rep")
    }
    assert result["metrics"]["attended/cross"] == pytest.approx(1.0)  # the budget
    assert result["metrics"]["train/steps"] == 4
    assert result["metrics"]["params"] == count_parameters(cell.spec)
    assert before <= datetime.fromisoformat(result["finished"]) <= datetime.now(UTC)
    assert result["total_seconds"] >= result["metrics"]["train/seconds"]
    assert 0 <= (result["shared_seconds"] or 0) <= result["total_seconds"]  # none where the system does not count
    assert set(result["data"]) == {"folder", "digest", "content_sha256"}
    assert {path.name for path in folder.iterdir()} == {
        "spec.yaml", "env.json", "metrics.jsonl", "checkpoints", "hyps", "result.json",
    }  # fmt: skip
    assert {"valid.txt", "valid.ref.txt", "test.txt", "test.ref.txt"} <= {
        path.name for path in (folder / "hyps").iterdir()
    }
    for path in folder.rglob("*.json*"):
        assert str(bench.folder) not in path.read_text()
        assert str(bench.cache) not in path.read_text()


def test_a_process_is_set_up_before_it_multiplies(bench: Any, monkeypatch: pytest.MonkeyPatch):
    found: list[str] = []
    for name in ("keep_freed_memory", "keep_few_products", "use_onednn_float32"):
        monkeypatch.setattr(pipeline, name, lambda name=name: found.append(name))
    finish(bench, bench.experiment())
    assert found == ["keep_freed_memory", "keep_few_products", "use_onednn_float32"]


def test_each_cell_of_a_process_logs_the_memory_that_it_took_itself(bench: Any, monkeypatch: pytest.MonkeyPatch):
    peak = 0

    def forget(_: Runtime) -> None:
        nonlocal peak
        peak = 0

    def grown(_: Runtime) -> int:
        nonlocal peak
        peak += 1
        return peak

    monkeypatch.setattr(Runtime, "forget_peak", forget)
    monkeypatch.setattr(Runtime, "peak_memory_mb", grown)
    experiment = bench.experiment()
    bench.run(experiment, jobs=1)
    for index in range(2):
        log = read_jsonl(bench.cell(experiment, index) / "metrics.jsonl")
        assert [line["train/max_mem_mb"] for line in log if "train/max_mem_mb" in line] == [1, 2, 3, 4]


def test_a_listener_hears_every_line_of_the_log(bench: Any):
    folder, _, heard = finish(bench, bench.experiment())
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [record for record in heard if "event" not in record] == lines
    assert [record["event"] for record in heard if "event" in record] == ["finished at step 4; evaluating step 4"]


def test_the_same_cell_gives_the_same_numbers(bench: Any):
    one, two = bench.experiment({"name": "one"}), bench.experiment({"name": "two"})
    (_, first, _), (folder, second, _) = finish(bench, one), finish(bench, two)
    timed = {"train/tokens_per_s", "decode/tokens_per_s", "train/seconds"}

    def untimed(result: dict[str, Any]) -> dict[str, float]:
        return {name: value for name, value in result["metrics"].items() if name not in timed and "decode" not in name}

    assert untimed(first) == untimed(second)
    a, b = build_model(one.cells[0].spec), build_model(two.cells[0].spec)
    load_weights(a, weights_path(bench.runs / "one" / "cells" / one.cells[0].folder / "checkpoints", 4))
    load_weights(b, weights_path(folder / "checkpoints", 4))
    assert all(torch.equal(a.state_dict()[name], tensor) for name, tensor in b.state_dict().items())


def test_seeds_differ_and_budgets_share_their_start(bench: Any):
    experiment = bench.experiment({"grid": {"seeds": [1, 2], "axes": {"model.attention.default.budget": [1, "inf"]}}})
    states = [build_model(cell.spec).state_dict() for cell in experiment.cells]
    assert all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_mean_of_the_last_checkpoints_is_evaluated(bench: Any, monkeypatch: pytest.MonkeyPatch):
    experiment = bench.experiment({"train": {"average": 2, "validate_every": 1}})
    seen: dict[str, Any] = {}
    evaluate = run_cell.__globals__["evaluate"]

    def spy(task: Any, model: Any, *rest: Any) -> Any:
        seen.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
        assert not model.training
        return evaluate(task, model, *rest)

    monkeypatch.setitem(run_cell.__globals__, "evaluate", spy)
    folder, result, heard = finish(bench, experiment)
    assert result["weights"] == [3, 4]
    assert heard[-1]["event"].endswith("the mean of 2 checkpoints up to step 4")
    mean = build_model(experiment.cells[0].spec)
    load_average(mean, folder / "checkpoints", [3, 4])
    assert all(torch.equal(seen[name], tensor) for name, tensor in mean.state_dict().items())


@pytest.fixture
def breaks_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """breaks_at(n): the training loss is NaN from update n on."""
    from attnbench.tasks.translation import Translation

    loss = Translation.loss

    def breaks(at: int) -> None:
        calls = 0

        def breaking(self: Any, model: Any, batch: Any, smoothing: float) -> Any:
            nonlocal calls
            found = loss(self, model, batch, smoothing)
            calls += model.training
            return found._replace(total=found.total * math.nan) if model.training and calls >= at else found

        monkeypatch.setattr(Translation, "loss", breaking)

    return breaks


def test_a_divergence_after_a_checkpoint_is_scored_by_its_best(bench: Any, breaks_at: Any):
    breaks_at(4)
    _, result, _ = finish(bench, bench.experiment({"train": {"average": 2}}))
    assert result["status"] == "done"
    outcome = result["outcome"]
    assert (outcome["kind"], outcome["step"]) == ("diverged", 4)
    assert outcome["seen"] == "gradient of source_embedding.table.weight is not finite"
    assert outcome["text"] == f"diverged at step 4, in epoch 1: {outcome['seen']}"
    assert (result["weights"], result["metrics"]["train/steps"]) == ([2], 3)
    assert {"test/bleu", "best/step"} <= set(result["metrics"])


def test_a_divergence_before_any_checkpoint_is_a_result_without_scores(bench: Any, breaks_at: Any):
    breaks_at(2)
    experiment = bench.experiment()
    folder, result, heard = finish(bench, experiment)
    assert (result["status"], result["weights"], result["signatures"]) == ("done", [], {})
    assert (result["outcome"]["kind"], result["outcome"]["step"]) == ("diverged", 2)
    assert set(result["metrics"]) == {
        "train/steps", "train/tokens", "train/seconds", "train/tokens_per_s", "train/epochs", "params",
    }  # fmt: skip
    assert not (folder / "hyps").exists()
    assert "no checkpoint lies before it, so there are no scores; lower the learning rate" in heard[-1]["event"]
    write_grid(bench.runs / "tiny", experiment, "")
    assert [(cell.status, cell.scored) for cell in collect(bench.runs / "tiny").cells[:1]] == [("done", False)]


def cut_off(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted between its training and its scores."""
    with monkeypatch.context() as patch:
        patch.setitem(run_cell.__globals__, "evaluate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            finish(bench, bench.experiment())


def test_a_resumed_cell_keeps_each_environment(bench: Any, monkeypatch: pytest.MonkeyPatch):
    made = iter([{"commit": "one", "dirty": True}, {"commit": "two", "dirty": False}])
    monkeypatch.setitem(run_cell.__globals__, "environment", lambda _: next(made))
    cut_off(bench, monkeypatch)
    folder, result, heard = finish(bench, bench.experiment())
    assert heard[0] == {"event": "goes on from step 4"}
    assert [(attempt["from_step"], attempt["commit"]) for attempt in environments(folder / "env.json")] == [
        (0, "one"), (4, "two"),
    ]  # fmt: skip
    assert (result["commit"], result["dirty"]) == ("two", True)


class Busy:
    """Cores that another program takes for 1,000 seconds between any two looks."""

    looks = 0

    @property
    def seconds(self) -> float:
        self.looks += 1
        return 1000.0 * self.looks


@pytest.mark.parametrize("counted", [0.0, None])
def test_a_resumed_cell_keeps_the_seconds_in_which_others_used_the_cores(
    bench: Any, monkeypatch: pytest.MonkeyPatch, counted: float | None
):
    """A training of hours beside other programs may end alone in a minute."""
    met = iter([Busy(), Shared(counted)])
    monkeypatch.setattr(pipeline, "relieved", lambda *_: nullcontext(next(met)))
    cut_off(bench, monkeypatch)
    _, result, _ = finish(bench, bench.experiment())
    assert result["shared_seconds"] == 4000  # one look at each update


@pytest.mark.parametrize(("later", "told"), [
    ({}, None),
    ({"commit": "two"}, None),
    ({"threads": 1, "compiled": None}, "threads 1, before 2; compiled none, before g++ 13"),
    ({"threads": 1, "packages": {}}, "threads 1, before 2"),
    ({"packages": {"torch": "2.14"}}, "torch 2.14, before 2.13"),
    ({"precision": "fp32"}, None),  # the first did not note it
])  # fmt: skip
def test_a_training_that_goes_on_to_other_last_digits_says_so(bench: Any, monkeypatch, later: Any, told: str | None):
    began = {"commit": "one", "dirty": False, "threads": 2, "compiled": "g++ 13", "packages": {"torch": "2.13"}}
    made = iter([began, {**began, **later}])
    monkeypatch.setitem(run_cell.__globals__, "environment", lambda _: next(made))
    cut_off(bench, monkeypatch)
    _, _, heard = finish(bench, bench.experiment())
    said = [record["event"] for record in heard if "last digits" in record.get("event", "")]
    assert said == ([f"from step 4 on last digits are others than they would have been: {told}"] if told else [])


@pytest.mark.parametrize("known", [True, False])
def test_bfloat16_is_computed_where_it_is_known_and_else_float32_says_so(known: bool, bench: Any, monkeypatch: Any):
    monkeypatch.setattr(runtime_module, "multiplies_bfloat16", lambda device: known)
    folder, _, heard = finish(bench, bench.experiment({"train": {"precision": "bf16", "max_steps": 2}}))
    assert environments(folder / "env.json")[0]["precision"] == ("bf16" if known else "fp32")
    said = [record["event"] for record in heard if "event" in record]
    assert ("products in float32 in place of bfloat16, for which this device has no instructions" in said) is not known


@pytest.mark.parametrize("known", [True, False])
def test_a_search_in_bfloat16_says_where_it_is_computed_in_float32(known: bool, bench: Any, monkeypatch: Any):
    monkeypatch.setattr("attnbench.search.base.multiplies_bfloat16", lambda device: known)
    search = {"kind": "greedy", "precision": "bf16"}
    folder, result, heard = finish(bench, bench.experiment({"train": {"max_steps": 2}, "search": search}))
    attempt = environments(folder / "env.json")[0]
    assert (attempt["precision"], attempt["search_precision"]) == ("fp32", "bf16" if known else "fp32")
    said = [record["event"] for record in heard if "event" in record]
    assert ("searches in float32 in place of bfloat16, for which this device has no instructions" in said) is not known
    assert result["metrics"]["test/bleu"] >= 0


def test_epochs_are_counted_and_timed_where_they_are_validated(bench: Any):
    train = {"validate_every": "epoch", "max_epochs": 3, "max_steps": 1000, "validate_bleu": True, "train_bleu": 4}
    folder, result, heard = finish(bench, bench.experiment({"train": train}))
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "epoch/seconds" in line]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert set(lines[0]) == {
        "step", "epoch", "elapsed_s", "epoch/train_loss", "epoch/train_ppl", "epoch/train_bleu", "epoch/valid_loss",
        "epoch/valid_ppl", "epoch/valid_bleu", "epoch/valid_seconds", "epoch/tokens", "epoch/seconds",
    }  # fmt: skip
    metrics = result["metrics"]
    assert metrics["train/epochs"] == 3
    best = min(lines, key=lambda line: line["epoch/valid_loss"])
    assert (metrics["best/epoch"], metrics["best/step"]) == (best["epoch"], best["step"])
    assert metrics["train/seconds_per_epoch"] == sorted(line["epoch/seconds"] for line in lines)[1]
    assert sum(line["epoch/tokens"] for line in lines) == metrics["train/tokens"]
    assert [record["epoch"] for record in heard if "epoch/seconds" in record] == [1, 2, 3]


def test_absent_data_are_told(bench: Any, tmp_path: Path):
    cell = bench.experiment().cells[0]
    with Run.claim(bench.runs, cell) as run, pytest.raises(DataError, match=r"not prepared.*attnbench prepare"):
        run_cell(cell, run, Place(tmp_path / "empty"), lambda _: None)


def test_a_best_checkpoint_that_is_gone_is_told(bench: Any):
    rising = {"kind": "constant", "lr": 30.0, "warmup": 100}
    experiment = bench.experiment({"train": {"validate_every": 1, "schedule": rising}})
    folder, result, _ = finish(bench, experiment)
    best = result["metrics"]["best/step"]
    assert best < 4  # such rates do ever more harm
    shutil.rmtree(folder / "checkpoints" / f"step-{best}")
    with pytest.raises(AttnbenchError, match=f"the best checkpoint, step {best}, is gone; run the cell with --fresh"):
        finish(bench, experiment)


def test_data_that_change_while_a_cell_trains_fail_it(bench: Any, monkeypatch: pytest.MonkeyPatch):
    """Prepared anew by another command, from other files of the same names: the rest would be another corpus."""
    hashes = iter("ab")  # as it begins, and when all is scored
    monkeypatch.setattr("attnbench.experiment.pipeline.content_sha256", lambda _: next(hashes))
    with pytest.raises(AttnbenchError, match="not those that this cell began with; prepare them again"):
        finish(bench, bench.experiment())
    assert not list(bench.runs.glob("*/cells/*/result.json"))


@pytest.mark.parametrize("name", ["checkpoints/data.json", "env.json"])
def test_a_damaged_file_of_a_cell_is_named(bench: Any, name: str):
    experiment = bench.experiment()
    folder, _, _ = finish(bench, experiment)
    (folder / name).write_text("{")
    (folder / "result.json").unlink()
    with pytest.raises(AttnbenchError, match=f"{name} is damaged: delete it"):
        finish(bench, experiment)


def test_parameters_are_counted_without_making_them(bench: Any):
    spec = bench.experiment().cells[0].spec
    assert count_parameters(spec) == sum(parameter.numel() for parameter in build_model(spec).parameters())
    big = bench.experiment({}, "model.width=65536", "model.layers=8").cells[0].spec
    assert count_parameters(big) > 10**11


def test_equal_splits_have_one_hash_whatever_prepared_them(tmp_path: Path, bench: Any):
    at = bench.experiment().cells[0].spec.task.data_path(bench.cache)
    manifest = json.loads((at / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "tools": {}, "sources": [], "downloads": ["x"]}))
    assert content_sha256(tmp_path) == content_sha256(at)
    for name in ("test.tgt.raw", "train.src.ids", "valid.tgt.txt", "test.docs"):
        files = {**manifest["files"], name: {"bytes": 1, "sha256": "0" * 64}}
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
        assert content_sha256(tmp_path) != content_sha256(at)


def test_reports_read_what_runs_write(bench: Any):
    experiment = bench.experiment()
    bench.run(experiment)
    cells = collect(bench.runs / "tiny").cells
    assert [cell.status for cell in cells] == ["done", "done"]
    assert [cell.label for cell in cells] == ["budget-1", "budget-inf"]
    assert cells[0].finished
    assert cells[0].data["content_sha256"] == cells[1].data["content_sha256"]


def test_the_environment_names_versions_and_no_place():
    found = environment(Runtime(torch.device("cpu")))
    assert found["attnbench"] == attnbench.__version__
    assert found["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (found["device"], found["precision"]) == ("cpu", "fp32")
    assert str(Path.home()) not in json.dumps(found)


@pytest.mark.parametrize(("used", "name"), [(True, "oneDNN"), (False, "default")])
def test_the_environment_names_what_multiplies(used: bool, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnbench.train.machine.onednn_in_use", lambda: used)
    monkeypatch.setattr("attnbench.train.machine.packed.chosen", lambda dtype: ("the matrix library", 0.7))
    found = environment(Runtime(torch.device("cpu")))
    assert (found["products"], found["searches"]) == (name, "the matrix library")
