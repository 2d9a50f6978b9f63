"""`attnbench sweep-k`: BLEU against k, for specs that say budget and for specs that do not."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest


def plan(invoke, *arguments) -> list[dict[str, Any]]:
    return json.loads(invoke("sweep-k", *arguments, "--dry-run", "--json").stdout)["cells"]


def write(text: str) -> str:
    Path("spec.yaml").write_text("name: mine\ntask: {kind: translation, dataset: demo}\n" + text)
    return "spec.yaml"


def test_a_sweep_ends_in_a_table(invoke, tiny, tree):
    result = invoke("sweep-k", *tiny, "--k", "1,inf", "--seeds", "1,2")
    root = Path("runs/demo")
    cells = {path.name[: path.name.rindex("-")] for path in (root / "cells").iterdir()}
    assert cells == {"budget-1-s1", "budget-1-s2", "budget-inf-s1", "budget-inf-s2"}
    attended = {}
    for path in (root / "cells").glob("*-s1-*/result.json"):
        attended[path.parent.name.split("-")[1]] = json.loads(path.read_text())["metrics"]["attended/encoder_self"]
    assert attended["1"] == pytest.approx(1, abs=0.05)  # ties are kept
    assert attended["inf"] > 4
    rows = list(csv.DictReader((root / "results.csv").read_text().splitlines()))
    assert len(rows) >= 2
    assert "inf" in result.stdout
    before = tree(root / "cells")
    again = invoke("sweep-k", *tiny, "--k", "1,inf", "--seeds", "1,2")
    assert "4 of 4 cells are done already" in again.stderr
    assert again.stdout == result.stdout
    assert tree(root / "cells") == before


def test_a_longer_sweep_keeps_what_is_done(invoke, tiny):
    invoke("sweep-k", *tiny, "--k", "1")
    result = invoke("sweep-k", *tiny, "--k", "1,2", "--json")
    assert "1 of 2 cells are done already" in result.stderr
    assert json.loads(result.stdout)["name"] == "demo"


def test_the_specs_own_budgets_are_the_default(invoke, tiny):
    assert [cell["label"] for cell in plan(invoke, *tiny)] == ["budget-1", "budget-2", "budget-4", "budget-inf"]
    assert [cell["label"] for cell in plan(invoke, *tiny, "--k", "3")] == ["budget-3"]


def test_a_spec_that_says_nothing_is_swept_with_top_k(invoke, tiny):
    spec = write("model: {kind: transformer, tie: decoder}\n")
    cells = plan(invoke, spec)
    assert [cell["label"] for cell in cells] == [f"budget-{k}" for k in (1, 2, 4, 8, 16, "inf")]
    assert len({cell["digest"] for cell in cells}) == 6
    document = json.loads(invoke("sweep-k", spec, "--k", "4", "--dry-run", "--json").stdout)
    sites = document["spec"]["model"]["attention"].values()
    assert [site["transform"]["k"] for site in sites] == [4, 4, 4]


def test_only_the_sites_that_take_a_budget_are_swept(invoke, tiny):
    spec = write(
        "model:\n  kind: transformer\n  tie: decoder\n"
        "  attention: {cross: {transform: topk}, encoder_self: {transform: sparsemax}}\n"
    )
    document = json.loads(invoke("sweep-k", spec, "--k", "4", "--dry-run", "--json").stdout)
    sites = document["spec"]["model"]["attention"]
    assert {role: site["transform"]["kind"] for role, site in sites.items()} == {
        "encoder_self": "sparsemax", "decoder_self": "softmax", "cross": "topk",
    }  # fmt: skip
    assert sites["cross"]["transform"]["k"] == 4


def test_seeds(invoke, tiny):
    assert [cell["seed"] for cell in plan(invoke, *tiny, "--k", "1", "--seeds", "3,1")] == [3, 1]
    assert [cell["seed"] for cell in plan(invoke, *tiny, "--k", "1", "--seed", "9")] == [9]


@pytest.mark.parametrize(("arguments", "words"), [
    (["--k", "1,x"], "--k 1,x: 'x' is no budget; write whole numbers from 1 on, or inf"),
    (["--k", "0"], "'0' is no budget"),
    (["--k", ""], "is no budget"),
    (["--k", "1,1"], "a budget stands twice"),
    (["--seeds", "1,a"], "--seeds 1,a: write whole numbers"),
    (["--seeds", "1,1"], "a seed stands twice"),
    (["--seed", "1", "--seeds", "2"], "exclude each other"),
    (["--seed", "-1"], "--seed"),
    (["--jobs", "0"], "--jobs 0: write a whole number from 1 on, or auto"),
    (["--jobs", "two"], "--jobs two: write a whole number from 1 on, or auto"),
])  # fmt: skip
def test_bad_options_name_the_mend(invoke, tiny, arguments, words):
    result = invoke("sweep-k", *tiny, *arguments, code=2)
    assert words in result.stderr
    assert result.stdout == ""


def test_a_spec_without_a_taker_says_so(invoke, tiny):
    spec = write(
        "model: {kind: transformer, tie: decoder, attention: {default: {transform: sparsemax}}}\n"
        "grid: {axes: {model.attention.default.budget: [1, 2]}}\n"
    )
    result = invoke("sweep-k", spec, code=2)
    assert "model.attention.default: the budget 1 has no taker" in result.stderr
    assert "spec.yaml:" in result.stderr
