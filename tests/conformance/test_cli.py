"""What every command keeps to: an example in its help, results on stdout and nothing else there, one JSON document."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from attnbench.cli.app import app

COMMANDS = {each.name: each.callback for each in app.registered_commands if each.name and each.callback}
WITHOUT_JSON = {"schema"}  # prints nothing but JSON
SMALL = [word for override in (
    "task.dataset={kind: demo, pairs: 60, held_out: 6}", "model.width=8", "model.heads=2", "model.ffn=8",
    "model.layers=1", "train.max_steps=2", "train.batch_tokens=200", "search=greedy",
) for word in ("--set", override)]  # fmt: skip


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


def document(text: str) -> object:
    return json.loads(text, parse_constant=refuse)


def test_the_commands_are_those_promised():
    assert set(COMMANDS) == {
        "prepare", "train", "eval", "sweep-k", "ablate", "copy-task", "align", "list", "schema", "report",
        "speed",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(invoke, command):
    text = invoke(command, "--help").stdout
    assert f"Example: attnbench {command}" in text
    assert f"Usage: attnbench {command}" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command):
    for parameter in inspect.signature(COMMANDS[command], eval_str=True).parameters.values():
        (meta,) = parameter.annotation.__metadata__
        assert meta.help, parameter.name


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - WITHOUT_JSON))
def test_what_prints_results_takes_json(command):
    assert "as_json" in inspect.signature(COMMANDS[command]).parameters


@pytest.mark.parametrize("arguments", [
    ["list", "mechanisms"], ["list", "datasets"], ["list", "models"], ["list", "specs"], ["list", "mechanisms", "topk"],
    ["prepare", "--list"], ["schema"],
    ["train", *SMALL, "--cell", "budget-1", "--dry-run"], ["sweep-k", "--dry-run"], ["ablate", "--dry-run"],
    ["copy-task", "--dry-run"],
], ids=lambda words: " ".join(word for word in words if "=" not in word and word != "--set"))  # fmt: skip
def test_json_is_one_document_on_stdout(invoke, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, *([] if arguments == ["schema"] else ["--json"]))
    assert document(result.stdout)
    assert not list(tmp_path.iterdir())


def test_the_arrows_from_spec_to_table(invoke, tmp_path, monkeypatch):
    """prepare, train, eval, report in turn, each with its one document; logs stay on stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    prepared = document(invoke("prepare", "demo", "--set", "pairs=60", "--set", "held_out=6", "--json").stdout)
    result = invoke("train", *SMALL, "--cell", "budget-inf", "--json")
    assert document(result.stdout)["name"] == "demo"
    assert "learning the vocabulary" not in result.stderr  # it was prepared
    assert "evaluating" in result.stderr
    (cell,) = Path("runs/demo/cells").iterdir()
    (cell / "checkpoints" / "data.json").unlink()  # as in a cell that was committed, or begun long ago
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")}
    scored = invoke("eval", cell, "--split", "valid", "--json")
    trained = json.loads((cell / "result.json").read_text())["metrics"]
    assert document(scored.stdout)["metrics"]["bleu"] == pytest.approx(trained["valid/bleu"])
    assert {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*")} == before
    told = invoke("eval", cell, "--input", "-", "--json", stdin="the dog sleep .\nthe cat\n")
    assert len(document(told.stdout)["translations"]) == 2
    assert document(invoke("report", "runs/demo", "--json").stdout)["name"] == "demo"
    assert prepared["prepared"][0]["splits"]["train"]["pairs"] == 60
