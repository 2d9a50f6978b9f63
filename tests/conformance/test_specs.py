"""Every spec that ships is sound: it validates, dry-runs without data, and means what it meant when it was run."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from attnbench.core.files import parse_yaml
from attnbench.experiment.document import read_document
from attnbench.experiment.dry_run import dry_run
from attnbench.experiment.grid import Experiment, expand
from attnbench.experiment.grid_file import write_grid
from attnbench.experiment.settings import Settings
from attnbench.experiment.spec import CellSpec
from attnbench.report.collect import collect
from attnbench.report.compare import comparison
from attnbench.report.rows import group
from attnbench.report.table import FORMATS, report

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "experiments").glob("*/results/**/result.json"))
GRIDS = sorted((ROOT / "experiments").glob("*/results/*/grid.json"))
SPECS = sorted(
    path
    for folder in (ROOT / "experiments", ROOT / "attnbench" / "specs")
    for path in folder.rglob("*.yaml")
    if path.name != "reported.yaml" and "results" not in path.relative_to(ROOT).parts
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def expanded(path: Path) -> Experiment:
    return expand(read_document(path))


def test_there_are_specs():
    assert ROOT / "attnbench" / "specs" / "demo.yaml" in SPECS
    assert ROOT / "experiments" / "explicit_sparse" / "multi30k-de-en.yaml" in SPECS


@pytest.mark.parametrize("path", SPECS, ids=name)
def test_it_validates_and_dry_runs(path, tmp_path):
    experiment = expanded(path)
    plan = dry_run(experiment, Settings(tmp_path / "runs", tmp_path / "cache"))
    assert plan["name"] == experiment.name
    assert len(plan["cells"]) == len(experiment.cells) > 0
    assert all(cell["parameters"] > 10_000 for cell in plan["cells"])
    assert len({cell["folder"] for cell in plan["cells"]}) == len(plan["cells"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", SPECS, ids=name)
def test_a_cell_is_what_its_dump_says(path):
    """The spec.yaml of a cell, read back, is the same run."""
    for cell in expanded(path).cells:
        again = CellSpec.model_validate(json.loads(json.dumps(cell.spec.dump())))
        assert again == cell.spec
        assert again.digest() == cell.digest


@pytest.mark.parametrize("path", SPECS, ids=name)
def test_it_says_what_it_is(path):
    """The first comment is what `attnbench list specs` shows."""
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(not line.startswith("# yaml-language-server") for line in comments)


def test_names_are_distinct():
    names = [expanded(path).name for path in SPECS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("path", [path for path in SPECS if "\n  compare:" in path.read_text()], ids=name)
def test_the_papers_numbers_stand_beside_its_rows(path, tmp_path):
    """Each system that it names is one of the paper's, and some row of ours is compared with it."""
    write_grid(tmp_path, expanded(path), "")
    table = collect(tmp_path)
    compared = comparison(table)
    assert not [note for note in compared.notes if note.startswith("no paper")]
    found = [number for row in group(table.cells) if (number := compared.of(row))]
    assert found
    mapped = (table.table["compare"].get("map") or {}).values()
    assert set(map(str, mapped)) <= {getattr(number, compared.key) for number in found}
    if any(row.k == "full" and row.table == compared.where["table"] for row in compared.rows):
        assert any(number.k == "full" for number in found)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: name(path.parent))
def test_a_result_still_belongs_to_its_spec(path):
    """Digests of what was run do not change: else finished cells would be run again, under another name."""
    raw = parse_yaml((path.parent / "spec.yaml").read_text())[0]
    assert CellSpec.model_validate(raw).digest() == json.loads(path.read_text())["digest"]


def test_digests_do_not_change():
    """The same for specs of every kind, so that it holds before anything is committed."""
    kept = json.loads((ROOT / "tests" / "golden" / "digests.json").read_text())
    assert {name: CellSpec.model_validate(entry["spec"]).digest() for name, entry in kept.items()} == {
        name: entry["digest"] for name, entry in kept.items()
    }


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: name(path.parent))
def test_committed_pages_are_what_report_makes_of_their_cells(path):
    """A reader who runs it finds nothing changed."""
    made = report(path.parent)
    for form in FORMATS:
        assert (path.parent / f"results.{form}").read_text() == made.text(form), form


def test_committed_results_hold_no_text_of_a_corpus():
    """Sources and references belong to the corpora; `report` finds them where the data are prepared."""
    assert RESULTS
    held = [
        each
        for pattern in ("*.src.txt", "*.ref.txt")
        for each in (ROOT / "experiments").glob(f"*/results/**/hyps/{pattern}")
    ]
    assert not held, [name(each) for each in held]
