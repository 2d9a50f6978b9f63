"""`attnbench ablate`: any axis of the grid, from the spec or from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DENSE = ("--set", "grid.axes={}", "--set", "model.attention={}")


def plan(invoke, *arguments) -> list[dict[str, Any]]:
    return json.loads(invoke("ablate", *arguments, "--dry-run", "--json").stdout)["cells"]


def labels(invoke, *arguments) -> list[str]:
    return [cell["label"] for cell in plan(invoke, *arguments)]


def test_transforms_side_by_side(invoke, tiny):
    axis = "transform=[softmax, {label: one, kind: topk, k: 1}, {kind: entmax, alpha: learned}]"
    result = invoke("ablate", *tiny, *DENSE, "--axis", axis, "--json")
    found = {}
    for path in Path("runs/demo/cells").glob("*/result.json"):
        content = json.loads(path.read_text())
        found[content["label"]] = content["metrics"]
    assert set(found) == {"softmax", "one", "entmax-learned"}
    assert found["one"]["attended/cross"] < 1.1
    assert found["softmax"]["attended/cross"] > 3
    assert found["entmax-learned"]["params"] == found["softmax"]["params"] + 3 * 2
    assert json.loads(result.stdout)["name"] == "demo"
    again = invoke("ablate", *tiny, *DENSE, "--axis", axis)
    assert "3 of 3 cells are done already" in again.stderr
    assert all(label in again.stdout for label in found)


def test_the_specs_own_grid_is_the_default(invoke, tiny):
    assert labels(invoke, *tiny) == ["budget-1", "budget-2", "budget-4", "budget-inf"]


@pytest.mark.parametrize(("axis", "wanted"), [
    ("transform=softmax,sparsemax", ["softmax", "sparsemax"]),
    ("sparsify=train,both", ["train", "both"]),
    ("train.max_steps=2,3", ["max_steps-2", "max_steps-3"]),
    ("model.dropout=[0.1, 0.2]", ["dropout-0.1", "dropout-0.2"]),
])  # fmt: skip
def test_an_axis_takes_values_in_turn(invoke, tiny, axis, wanted):
    cells = plan(invoke, *tiny, *DENSE, "--axis", axis)
    assert [cell["label"] for cell in cells] == wanted
    if not axis.startswith("sparsify"):  # of softmax both are one run
        assert len({cell["digest"] for cell in cells}) == len(wanted)


def test_axes_multiply(invoke, tiny):
    four = "model.attention.default.transform={kind: topk, k: 4}"
    found = labels(invoke, *tiny, *DENSE, "--set", four, "--axis", "site=all,cross", "--axis", "sparsify=train,both")
    assert found == ["all train", "all both", "cross train", "cross both"]


def test_site_makes_the_others_dense(invoke, tiny):
    base = [*tiny, *DENSE, "--set", "model.attention.default.transform={kind: topk, k: 4}"]
    document = json.loads(invoke("ablate", *base, "--axis", "site=cross", "--dry-run", "--json").stdout)
    kinds = {role: site["transform"]["kind"] for role, site in document["spec"]["model"]["attention"].items()}
    assert kinds == {"encoder_self": "softmax", "decoder_self": "softmax", "cross": "topk"}


@pytest.mark.parametrize(("axis", "words"), [
    ("foo=1", "--axis foo=1: unknown axis 'foo' (known: transform, pattern, sparsify, budget, site"),
    ("transfrom=softmax", "did you mean 'transform'"),
    ("foo", "--axis foo: write it as name=value,value"),
    ("transform=", "write it as name=value,value"),
    ("transform=[", "not valid YAML"),
    ("site=cros", "unknown site 'cros'; did you mean 'cross'"),
    ("transform=topkk", "unknown transform 'topkk'; did you mean 'topk'"),
    ("transform=topk", "give k, ratio or a budget"),
    ("train.max_step=1", "unknown key 'max_step'; did you mean 'max_steps'"),
    ("trian.max_steps=1", "did you mean 'train'"),
])  # fmt: skip
@pytest.mark.parametrize("dry", [True, False])
def test_bad_axes_name_the_mend(invoke, tiny, axis, words, dry):
    result = invoke("ablate", *tiny, *DENSE, "--axis", axis, *(["--dry-run"] if dry else []), code=2)
    assert words in result.stderr
    assert axis.split("=")[0] in result.stderr
    assert result.stdout == ""
    assert not Path("runs").exists()


def test_a_metric_that_is_misspelt_is_told_before_the_training(invoke, tiny):
    told = invoke("ablate", *tiny, "--set", "table.value=[test/blue, test/own]", "--dry-run").stderr
    assert "table.value: 'test/blue' is no metric that is known; did you mean 'test/bleu'?" in told
    assert "'test/own'" not in told
    assert "is known" not in invoke("ablate", *tiny, "--dry-run").stderr


def test_a_dry_run_says_how_many_runs_the_cells_are(invoke, tiny):
    """At an endless budget every site is dense, whichever was named."""
    options = ("--axis", "site=cross,all", "--axis", "budget=2,inf", "--dry-run")
    assert "4 cells, 3 runs: cells of one digest are one, would go to" in invoke("ablate", *tiny, *options).stdout
    assert "runs:" not in invoke("ablate", *tiny, "--dry-run").stdout.splitlines()[-1]


def test_a_label_in_brackets_is_shown_as_it_is(invoke, tiny):
    axis = "transform=[{label: 'entmax [/fixed]', kind: entmax, alpha: 1.7}, {label: '[bold]', kind: softmax}]"
    shown = invoke("ablate", *tiny, *DENSE, "--axis", axis, "--dry-run").stdout
    assert "entmax [/fixed]" in shown
    assert "[bold]" in shown
