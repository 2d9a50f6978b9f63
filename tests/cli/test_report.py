"""`attnbench report`: what is printed, what is written, what is refused."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attnbench.cli.report import report
from attnbench.core.errors import AttnbenchError, DataError, SpecError

app = typer.Typer()
app.command()(report)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished grid of two cells."""
    root = tmp_path / "runs" / "smoke" / "demo"
    cells = []
    for label, bleu in (("budget-8", 30.25), ("budget-inf", 31.5)):
        cell = root / "cells" / f"{label}-s1-0000"
        (cell / "checkpoints").mkdir(parents=True)
        result = {"metrics": {"test/bleu": bleu}, "signatures": {"test/bleu": "s"}, "finished": "2026-01-01"}
        (cell / "result.json").write_text(json.dumps(result))
        axes = {"model.attention.default.budget": label[7:]}
        cells.append(
            {"label": label, "digest": "", "folder": cell.name, "seed": 1, "axes": axes, "row": {"label": label}}
        )
    grid = {"schema_version": 1, "name": "smoke/demo", "command": "attnbench sweep-k", "cells": cells}
    (root / "grid.json").write_text(json.dumps({**grid, "table": {"value": "test/bleu"}, "source": None}))
    return root


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_table_is_printed_and_the_results_are_made(folder: Path):
    text = run(folder)
    assert "budget-8" in text
    assert "31.50 (1)" in text
    assert {path.name for path in folder.glob("results.*")} == {
        "results.json",
        "results.csv",
        "results.md",
        "results.tex",
    }


@pytest.mark.parametrize("arguments", [("--json",), ("--format", "json"), ("--json", "--format", "json")])
def test_json_is_one_document(folder: Path, arguments: tuple[str, ...]):
    content = json.loads(run(folder, *arguments))
    assert content["results"]["budget-8"]["test/bleu"] == 30.25
    assert json.loads((folder / "results.json").read_text()) == content


def test_the_other_formats_are_the_files(folder: Path):
    for format in ("md", "csv", "tex"):
        assert run(folder, "--format", format) == (folder / f"results.{format}").read_text()
    assert [row["row"] for row in csv.DictReader(io.StringIO(run(folder, "--format", "csv")))] == [
        "budget-8",
        "budget-inf",
    ]


def test_results_are_made_again_from_the_cells(folder: Path):
    run(folder)
    (folder / "results.md").write_text("stale")
    (folder / "cells" / "budget-8-s1-0000" / "result.json").unlink()
    run(folder)
    rows = [line for line in (folder / "results.md").read_text().splitlines() if line.startswith("| budget-8 ")]
    assert rows == ["| budget-8 | queued |"]


def test_save_copies_what_is_worth_committing(folder: Path, tmp_path: Path):
    run(folder, "--save", tmp_path / "results")
    copy = tmp_path / "results" / "demo"
    assert (copy / "cells" / "budget-8-s1-0000" / "result.json").is_file()
    assert not list(copy.rglob("checkpoints"))
    result = folder / "cells" / "budget-8-s1-0000" / "result.json"
    result.write_text(result.read_text().replace("30.25", "99.0"))
    with pytest.raises(AttnbenchError, match="holds a different result"):
        run(folder, "--save", tmp_path / "results")


def test_a_folder_that_is_only_to_be_read_still_has_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("attnbench.report.table.write_atomic", refuse)
    assert "31.50 (1)" in run(folder)
    assert "could not be written" in caplog.text


def test_bad_usage(folder: Path, tmp_path: Path):
    with pytest.raises(SpecError, match="exclude each other"):
        run(folder, "--json", "--format", "md")
    with pytest.raises(SpecError, match=r"--save .*grid\.json: this is a file; name a folder"):
        run(folder, "--save", folder / "grid.json")
    with pytest.raises(DataError, match=r"run folders below it: .*smoke/demo"):
        run(tmp_path / "runs")
    result = CliRunner().invoke(app, [str(folder), "--format", "html"])
    assert result.exit_code == 2


def test_examples_are_a_page_of_their_own(folder: Path):
    for cell in sorted((folder / "cells").iterdir()):
        hyps = cell / "hyps"
        hyps.mkdir()
        count = "2 9\n0 9\n" if "8" in cell.name else "0 9\n0 9\n"
        for name, text in (("", "a\nb\n"), (".src", "x\ny\n"), (".ref", "a\nb\n"), (".rep", count), (".drop", count)):
            (hyps / f"test{name}.txt").write_text(text)
    page = run(folder, "--examples", "budget-8", "budget-inf")
    assert page.startswith("# Examples: budget-8 and budget-inf\n")
    assert page.count("Sentence ") == 1
    assert not list(folder.glob("results.*"))
    assert "leaves out" in run(folder, "--examples", "budget-8", "budget-inf", "--by", "drop")
    with pytest.raises(SpecError, match="name two rows"):
        run(folder, "--by", "drop")
    with pytest.raises(SpecError, match="a page of its own"):
        run(folder, "--examples", "budget-8", "budget-inf", "--json")


def test_two_rows_are_compared(folder: Path):
    shown = run(folder, "--compare", "budget-8", "budget-inf")
    assert "30.25" in shown
    assert "+1.25" in shown
    assert (
        json.loads(run(folder, "--compare", "budget-8", "budget-inf", "--json"))["differences"][0]["difference"] == 1.25
    )
    assert not (folder / "results.md").exists()
    with pytest.raises(SpecError, match="--compare prints a table of its own"):
        run(folder, "--compare", "budget-8", "budget-inf", "--format", "md")
