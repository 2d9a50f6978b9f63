from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.cli import common
from attnbench.core.errors import AttnbenchError
from attnbench.experiment.dry_run import dry_run
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import content_sha256
from attnbench.experiment.session import run_grid
from attnbench.experiment.settings import Settings

SEEDS = {"grid": {"seeds": [12, 13, 14], "axes": {"model.attention.default.budget": [1]}}}


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_dry_run_writes_nothing(
    bench: Any, snapshot: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], prepared: bool, as_json: bool
):
    if not prepared:
        bench.cache = tmp_path / "no cache"
    experiment = bench.experiment({"table": {"rows": "budget"}})
    folders = [folder for folder in (bench.folder, bench.cache) if folder.exists()]
    before = snapshot(*folders)
    common.conduct(experiment, bench.settings(), dry=True, as_json=as_json)
    assert snapshot(*folders) == before
    assert not bench.runs.exists()
    assert bench.cache.exists() == prepared
    out = capsys.readouterr().out
    plan = json.loads(out) if as_json else dry_run(experiment, bench.settings())
    assert [cell["data_ready"] for cell in plan["cells"]] == [prepared, prepared]
    assert [cell["done"] for cell in plan["cells"]] == [False, False]
    assert plan["cells"][0]["parameters"] > 1000
    assert plan["spec"]["model"]["width"] == 16
    assert plan["folder"] == str(bench.runs / "tiny")
    assert experiment.cells[0].digest[:8] in out


def test_a_dry_run_knows_what_is_done(bench: Any, ran: list[Cell]):
    experiment = bench.experiment(SEEDS)
    bench.run(experiment)
    assert [cell["done"] for cell in dry_run(experiment, bench.settings())["cells"]] == [True, False, True]


def test_a_dry_run_knows_what_would_be_taken_over(bench: Any, capsys: pytest.CaptureFixture[str]):
    experiment = bench.experiment()
    first = experiment.cells[0]
    committed = bench.folder / "results" / "tiny" / "cells" / first.folder
    committed.mkdir(parents=True)
    (committed / "result.json").write_text(json.dumps({"digest": first.digest, "metrics": {}}))
    cells = dry_run(experiment, bench.settings())["cells"]
    assert [(cell["done"], cell["taken_from"]) for cell in cells] == [(True, str(committed)), (False, None)]
    assert [cell["done"] for cell in dry_run(experiment, bench.settings(fresh=True))["cells"]] == [False, False]
    common.conduct(experiment, bench.settings(), dry=True, as_json=False)
    assert f"budget-1, seed 1: done in {committed}" in capsys.readouterr().out
    assert not bench.runs.exists()


def test_a_dry_run_knows_that_own_text_has_changed(
    bench: Any, ran: list[Cell], tmp_path: Path, snapshot: Any, caplog: pytest.LogCaptureFixture
):
    for side in ("de", "en"):
        (tmp_path / f"t.{side}").write_text("".join(f"haus {line}\n" for line in range(12)))
    train = f"{{source: {tmp_path}/t.de, target: {tmp_path}/t.en}}"
    files = f"{{kind: parallel, languages: [de, en], hold_every: 4, train: {train}}}"
    experiment = bench.experiment({}, f"task={{kind: translation, dataset: {files}, tokenizer: word}}")
    settings = Settings(bench.runs, tmp_path / "cache")
    list(run_grid(experiment, settings, "attnbench test"))
    for number in range(2):  # as a real run notes it
        path = bench.cell(experiment, number) / "result.json"
        content = content_sha256(experiment.cells[0].spec.task.data_path(settings.cache))
        path.write_text(json.dumps({**json.loads(path.read_text()), "data": {"content_sha256": content}}))

    def told() -> set[tuple[bool, bool]]:
        return {(cell["done"], cell["data_ready"]) for cell in dry_run(experiment, settings)["cells"]}

    assert told() == {(True, True)}
    (tmp_path / "t.de").write_text("".join(f"hund {line}\n" for line in range(12)))
    before = snapshot(tmp_path)
    assert told() == {(False, False)}
    assert snapshot(tmp_path) == before
    assert caplog.text.count("t.de is not what it was when it was prepared; a run prepares it again") == 1
    assert "a run stops and asks for --fresh" in caplog.text.replace("\n", " ")
    with pytest.raises(AttnbenchError, match="run with --fresh, or under another name"):
        list(run_grid(experiment, settings, "attnbench test"))
    caplog.clear()
    assert told() == {(False, True)}  # that run has prepared the text
    assert "a run stops: " in caplog.text
    caplog.clear()
    settings = replace(settings, fresh=True)
    assert told() == {(False, True)}
    assert not caplog.text
    settings = Settings(bench.runs, tmp_path / "another cache")
    assert told() == {(False, False)}
    assert "a run stops and asks for --fresh" in caplog.text
    (bench.runs / "tiny").rename(bench.runs / "other")
    assert told() == {(False, False)}
    assert "2 cells are done elsewhere, where that was of the same text" in caplog.text
