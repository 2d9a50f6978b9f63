"""`attnbench list`: everything that a spec can name, and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from attnbench.attention.transforms.base import transforms
from attnbench.cli.list import Family, list_, show_datasets
from attnbench.core.errors import SpecError
from attnbench.data.datasets.base import datasets
from attnbench.data.tokenizers.base import tokenizers
from attnbench.models.base import models
from attnbench.models.fertility.base import fertilities
from attnbench.search.base import searches
from attnbench.search.coverage_penalty import coverage_penalties
from attnbench.search.length_penalty import length_penalties
from attnbench.train.optim import optimizers, schedules

app = typer.Typer()
app.command()(list_)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def listed(*arguments: str) -> list[dict[str, Any]]:
    return json.loads(run(*arguments, "--json"))


def test_every_registered_member_is_listed():
    assert {each["name"] for each in listed("mechanisms") if each["kind"] == "transform"} == set(transforms.kinds())
    assert {each["name"] for each in listed("mechanisms") if each["kind"] == "fertility"} == set(fertilities.kinds())
    assert [each["name"] for each in listed("datasets")] == datasets.kinds()
    assert [each["name"] for each in listed("models")] == models.kinds()
    assert [each["name"] for each in listed("tokenizers")] == tokenizers.kinds()
    for kind, family in (("optimizer", optimizers), ("schedule", schedules)):
        assert [each["name"] for each in listed("training") if each["kind"] == kind] == family.kinds()
    for kind, family in (
        ("search", searches), ("length penalty", length_penalties), ("coverage penalty", coverage_penalties)
    ):  # fmt: skip
        assert [each["name"] for each in listed("searches") if each["kind"] == kind] == family.kinds()


def test_packaged_specs_and_those_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paper = tmp_path / "experiments" / "paper"
    (paper / "results" / "table1").mkdir(parents=True)
    (paper / "table1.yaml").write_text(
        "# yaml-language-server: $schema=../schema.json\n# Table 1,\n# the whole.\n# Seeds: 3.\n#\n# More.\nname: x\n"
    )
    (paper / "reported.yaml").write_text("rows: []\n")
    (paper / "results" / "table1" / "spec.yaml").write_text("name: x\n")
    monkeypatch.chdir(tmp_path)
    found = {each["name"]: each for each in listed("specs")}
    assert found["demo"]["where"] == "packaged"
    assert {name for name, each in found.items() if each["where"] == "experiments"} == {"experiments/paper/table1.yaml"}
    assert found["experiments/paper/table1.yaml"]["description"] == "Table 1, the whole."


def test_lists_are_whole_in_a_pipe():
    text = run("mechanisms")
    line = next(line for line in text.splitlines() if " topk " in line)
    assert "k, ratio" in line
    assert "Zhao et al. 2019" in line


@pytest.mark.parametrize("family", list(Family))
def test_each_list_names_all_entries(family: Family):
    text = run(family)
    assert all(f" {each['name']} " in text for each in listed(family))


def test_one_in_full():
    content = yaml.safe_load(run("mechanisms", "topk"))
    assert content["kind"] == "transform"
    assert content["parameters"]["ties"]["default"] == "threshold"
    assert content["parameters"]["k"]["description"]
    assert [each["name"] for each in listed("mechanisms", "topk")] == ["topk"]
    assert yaml.safe_load(run("models", "transformer"))["parameters"]["heads"]["default"] == 8


def test_an_unknown_name_has_a_neighbour():
    with pytest.raises(SpecError, match="unknown mechanism 'topkk'; did you mean 'topk'"):
        run("mechanisms", "topkk")
    assert CliRunner().invoke(app, ["mechanism"]).exit_code == 2


def test_prepare_shows_the_same_list(capsys: pytest.CaptureFixture[str]):
    show_datasets(as_json=True)
    assert json.loads(capsys.readouterr().out) == listed("datasets")


def test_names_are_whole_in_a_narrow_terminal(invoke, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "40")
    assert "…" not in invoke("list", "mechanisms").stdout
