"""Every spec that ships is sound: it validates, dry-runs without data, and means what it meant when it was run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.files import parse_yaml
from attnbench.experiment.grid import expand, read_document
from attnbench.experiment.session import Settings, dry_run
from attnbench.experiment.spec import CellSpec

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "experiments").glob("*/results/**/result.json"))
SPECS = sorted(
    path
    for folder in (ROOT / "experiments", ROOT / "attnbench" / "specs")
    for path in folder.rglob("*.yaml")
    if path.name != "reported.yaml" and "results" not in path.relative_to(ROOT).parts
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_specs():
    assert ROOT / "attnbench" / "specs" / "demo.yaml" in SPECS
    assert ROOT / "experiments" / "explicit_sparse" / "multi30k-de-en.yaml" in SPECS


@pytest.mark.parametrize("path", SPECS, ids=name)
def test_it_validates_and_dry_runs(path, tmp_path):
    experiment = expand(read_document(path))
    plan = dry_run(experiment, Settings(tmp_path / "runs", tmp_path / "cache"))
    assert plan["name"] == experiment.name
    assert len(plan["cells"]) == len(experiment.cells) > 0
    assert all(cell["parameters"] > 10_000 for cell in plan["cells"])
    assert len({cell["folder"] for cell in plan["cells"]}) == len(plan["cells"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", SPECS, ids=name)
def test_a_cell_is_what_its_dump_says(path):
    """The spec.yaml of a cell, read back, is the same run."""
    for cell in expand(read_document(path)).cells:
        again = CellSpec.model_validate(json.loads(json.dumps(cell.spec.dump())))
        assert again == cell.spec
        assert again.digest() == cell.digest


@pytest.mark.parametrize("path", SPECS, ids=name)
def test_it_says_what_it_is(path):
    """The first comment is what `attnbench list specs` shows."""
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(not line.startswith("# yaml-language-server") for line in comments)


def test_names_are_distinct():
    names = [expand(read_document(path)).name for path in SPECS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("path", SPECS, ids=name)
def test_the_papers_numbers_beside_it_exist(path):
    raw: Any = parse_yaml(path.read_text(), str(path))[0]
    compare = (raw.get("table") or {}).get("compare")
    if compare:
        folders = [path.parent, *path.parents]
        assert any((folder / compare["file"]).is_file() for folder in folders)


@pytest.mark.parametrize("path", RESULTS or [None], ids=lambda path: path and name(path.parent))
def test_a_result_still_belongs_to_its_spec(path):
    """Digests of what was run do not change: else finished cells would be run again, under another name."""
    if path is None:
        return  # none is committed
    raw = parse_yaml((path.parent / "spec.yaml").read_text())[0]
    assert CellSpec.model_validate(raw).digest() == json.loads(path.read_text())["digest"]


def test_digests_do_not_change():
    """The same for specs of every kind, so that it holds before anything is committed."""
    kept = json.loads((ROOT / "tests" / "golden" / "digests.json").read_text())
    assert {name: CellSpec.model_validate(entry["spec"]).digest() for name, entry in kept.items()} == {
        name: entry["digest"] for name, entry in kept.items()
    }


def test_committed_results_hold_no_text_of_a_corpus():
    """Sources and references belong to the corpora; `report` finds them where the data are prepared."""
    assert RESULTS
    held = [
        each
        for pattern in ("*.src.txt", "*.ref.txt")
        for each in (ROOT / "experiments").glob(f"*/results/**/hyps/{pattern}")
    ]
    assert not held, [name(each) for each in held]
