"""reported.yaml: its shape, and which number stands beside which row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbench.core.errors import SpecError
from attnbench.core.files import parse_yaml
from attnbench.report import compare as compare_module
from attnbench.report.collect import collect
from attnbench.report.compare import comparison, load_reported
from attnbench.report.rows import group
from attnbench.report.table import render

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FILES = sorted(EXPERIMENTS.glob("*/reported.yaml"))
COUNTS = {"explicit_sparse": 90, "extremely_sparse": 219, "fixed_memory": 3, "constrained": 96, "copy_seq2seq": 16}


def test_every_paper_has_its_numbers():
    assert {path.parent.name: len(load_reported(path).rows) for path in FILES} == COUNTS


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_reported_numbers_are_complete_and_distinct(path: Path):
    paper = load_reported(path)
    assert paper.title
    keys = {(row.table, row.dataset, row.metric, row.system, row.k, row.split) for row in paper.rows}
    assert len(keys) == len(paper.rows)
    for row in paper.rows:
        assert row.source in ("paper", "recalled") or row.source.startswith("found: ")
        assert (row.confidence is not None) == (row.source == "recalled")
        assert row.split in (None, "valid", "test")
        assert isinstance(row.value, (int, float)) or row.value in (">500", "intractable")
    tables = {row.table for row in paper.rows} | {None, "Figure 3"}
    assert all(note.text and note.table in tables for note in paper.notes)


def test_the_file_says_what_it_is():
    for path in FILES:
        head = path.read_text(encoding="utf-8").split("\n\n")[0]
        assert "None of them was measured here" in head
        assert "recalled" in head


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rows: 3\n", "needs 'rows'"),
        ("- 1\n", "needs 'rows'"),
        ("rows:\n  - {table: '1', system: x}\n", r"r\.yaml:2: rows\.0: no dataset, metric, value, source"),
        ("rows:\n  - 4\n", r"r\.yaml:2: rows\.0: no table"),
    ],
)
def test_another_shape_is_an_error_with_its_line(tmp_path: Path, content: str, message: str):
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(SpecError, match=message):
        load_reported(path)


def compare(where: dict[str, str], systems: dict[str, str], file: str = "reported.yaml") -> dict[str, object]:
    return {"compare": {"file": file, "where": where, "map": systems}}


def numbers(run, table, paper: str = "explicit_sparse"):
    folder = run.grid(table, source=str(EXPERIMENTS / paper / "spec.yaml"))
    experiment = collect(folder)
    compared = comparison(experiment)
    return {row.label: compared.of(row) for row in group(experiment.cells)}, compared.notes


def test_rows_find_their_systems(run_folder):
    run = run_folder()
    for label in ("softmax", "topk-8", "sigmoid"):
        run.add(label)
    where = {"table": "4", "dataset": "iwslt14_de_en", "metric": "BLEU"}
    found, notes = numbers(
        run, compare(where, {"softmax": "Transformer", "topk-8": "Proposal (top-k)", "sigmoid": "Sigmoid"})
    )
    assert {label: number.value if number else None for label, number in found.items()} == {
        "softmax": 35.3,
        "topk-8": 35.6,
        "sigmoid": None,
    }
    assert any("table 4, iwslt14_de_en, BLEU" in note for note in notes)
    assert any("no alpha was learned" in note for note in notes)
    assert "no paper number for 'Sigmoid'" in notes
    assert not any("recalled" in note for note in notes)


def test_a_budget_chooses_among_the_numbers_of_a_system(run_folder):
    run = run_folder()
    place, budget = "model.attention.default", "model.attention.default.budget"
    run.add("full", axes={place: "full"})
    run.add("window-8", axes={place: "window", budget: 8})
    run.add("window-3", axes={place: "window", budget: 3})
    run.add("window-inf", axes={place: "window", budget: "inf"})
    where = {"table": "1", "dataset": "wmt16_en_ro", "metric": "BLEU"}
    found, _ = numbers(run, compare(where, {"window": "Window", "full": "Full"}), "extremely_sparse")
    assert {label: number.value if number else None for label, number in found.items()} == {
        "full": 33.73,
        "window-8": 2.49,
        "window-3": None,  # the paper has none
        "window-inf": 33.73,  # the dense model
    }


def test_a_split_of_the_chosen_metric_is_none_of_another(run_folder, tmp_path: Path):
    """The paper's DROP is of the test set, whatever the BLEU is of that the table compares."""
    (tmp_path / "reported.yaml").write_text(
        "rows:\n"
        "  - {table: '1', dataset: d, metric: BLEU, system: softmax, value: 30.0, split: valid, source: paper}\n"
        "  - {table: '1', dataset: d, metric: DROP, system: softmax, value: 5.0, split: test, source: paper}\n"
    )
    run = run_folder()
    run.add("softmax")
    table = compare({"table": "1", "dataset": "d", "metric": "BLEU", "split": "valid"}, {"softmax": "softmax"})
    experiment = collect(run.grid(table, source=str(tmp_path / "spec.yaml")))
    compared, (row,) = comparison(experiment), group(experiment.cells)
    assert [number and number.value for number in (compared.of(row), compared.of(row, "DROP"))] == [30.0, 5.0]


def test_a_row_on_an_axis_that_the_paper_has_not_is_not_the_papers(run_folder):
    """As of `ablate table4 --axis site=all,none` or `--k 2,8`: the paper's numbers are of one site, and of one k."""
    run = run_folder()
    site, budget = "model.attention.site", "model.attention.all.budget"
    run.add("softmax all", axes={"cell": "softmax", site: "all"})
    run.add("softmax none", axes={"cell": "softmax", site: "none"})
    run.add("topk-8 budget-2", axes={"cell": "topk-8", budget: 2})
    run.add("whole label", axes={"cell": "softmax", site: "cross"})
    where = {"table": "4", "dataset": "iwslt14_de_en", "metric": "BLEU"}
    systems = {"softmax": "Transformer", "topk-8": "Proposal (top-k)", "whole label": "Transformer"}
    found, notes = numbers(run, compare(where, systems))
    values = {label: number.value if number else None for label, number in found.items()}
    assert values == {"softmax all": None, "softmax none": None, "topk-8 budget-2": None, "whole label": 35.3}
    assert f"no paper numbers along {site}: the table of the paper does not vary it" in notes


def test_of_two_budgets_the_paper_varies_one(run_folder):
    run = run_folder()
    cross, own = "model.attention.cross.budget", "model.attention.encoder_self.budget"
    for one, other in ((4, 1), (4, 3)):
        run.add(f"budget-{one} budget-{other}", axes={cross: one, own: other, "model.attention.default": "window"})
    where = {"table": "1", "dataset": "wmt16_en_ro", "metric": "BLEU"}
    found, notes = numbers(run, compare(where, {"window": "Window"}), "extremely_sparse")
    assert set(found.values()) == {None}
    assert f"no paper numbers along {own}: the table of the paper does not vary it" in notes


def test_without_a_map_rows_are_called_as_the_papers_systems(run_folder):
    run = run_folder()
    for label in ("sparsemax + CovVector", "ours"):
        run.add(label)
    where = {"table": "ACL18 Table 1", "dataset": "iwslt14_de_en", "metric": "BLEU"}
    found, notes = numbers(run, compare(where, {}), "constrained")
    assert found["ours"] is None
    assert found["sparsemax + CovVector"].metric == "BLEU"
    assert not any("no paper number" in note for note in notes)


def test_a_map_may_choose_the_k_of_one_system(run_folder):
    run = run_folder()
    run.add("dense")
    run.add("few", axes={"model.attention.default.budget": 2})
    where = {"table": "1", "dataset": "iwslt17_fr_en", "metric": "BLEU", "system": "Top-k Selective"}
    found, notes = numbers(run, compare(where, {"few": "8", "dense": "avg", "none": "32"}), "extremely_sparse")
    values = {label: number.value if number else None for label, number in found.items()}
    assert values == {"few": 37.64, "dense": 37.12}
    assert "no paper number for '32'" in notes


def test_a_recalled_number_says_so(run_folder):
    run = run_folder()
    run.add("softmax")
    where = {"table": "ACL18 Table 1", "dataset": "kftt_ja_en", "metric": "BLEU"}
    found, notes = numbers(run, compare(where, {"softmax": "softmax"}), "constrained")
    assert found["softmax"].text == "20.36 (recalled, medium confidence)"
    assert any(note.startswith("recalled: from memory") for note in notes)


def test_each_value_has_the_papers_number_beside_it(run_folder):
    run = run_folder()
    run.add("softmax", 1, 29.0, metrics={"test/rep": 3.1, "test/drop": 6.0})
    where = {"table": "ACL18 Table 1", "dataset": "iwslt14_de_en", "metric": "BLEU"}
    table = {**compare(where, {}), "value": ["test/bleu", "test/rep", "test/drop"]}
    page = render(run.grid(table, source=str(EXPERIMENTS / "constrained" / "spec.yaml")), "md")
    assert all(f"{number} (recalled, medium confidence)" in page for number in (29.51, 3.37, 5.89))


def test_a_number_stands_beside_its_own_metric_in_any_order(run_folder):
    run = run_folder()
    run.add("softmax", 1, 29.0, metrics={"test/rep": 3.1})
    where = {"table": "ACL18 Table 1", "dataset": "iwslt14_de_en", "metric": "BLEU"}
    folder = run.grid(
        {**compare(where, {}), "value": ["test/rep", "test/bleu"]}, str(EXPERIMENTS / "constrained" / "s")
    )
    (row,) = group(collect(folder).cells)
    compared = comparison(collect(folder))
    found = {name: compared.beside(row, name, ["test/rep", "test/bleu"]) for name in ("test/rep", "test/bleu")}
    assert {name: number and number.metric for name, number in found.items()} == {
        "test/rep": "REP",
        "test/bleu": "BLEU",
    }


def test_two_numbers_for_one_row_are_none(run_folder):
    run = run_folder()
    run.add("softmax")
    found, _ = numbers(run, compare({"dataset": "iwslt14_de_en", "table": "4"}, {"softmax": "Transformer"}))
    assert found["softmax"] is None


@pytest.mark.parametrize(
    ("table", "note"),
    [
        (compare({}, {}, file="absent.yaml"), "absent.yaml was not found"),
        (compare({"tabel": "1"}, {}), "no field tabel"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_a_note(run_folder, table, note: str):
    run = run_folder()
    run.add("softmax")
    found, notes = numbers(run, table)
    assert found == {"softmax": None}
    assert len(notes) == 1
    assert note in notes[0]


def test_a_broken_file_is_a_note(run_folder, tmp_path: Path):
    (tmp_path / "reported.yaml").write_text("rows: [\n")
    run = run_folder()
    compared = comparison(collect(run.grid({"compare": "reported.yaml"}, source=str(tmp_path / "spec.yaml"))))
    assert compared.rows == ()
    assert "no paper column" in compared.notes[0]


def test_a_committed_copy_finds_the_file_above_it(run_folder, tmp_path: Path):
    run = run_folder("experiments/paper/results/demo")
    run.add("softmax")
    (tmp_path / "experiments/paper/reported.yaml").parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "experiments/paper/reported.yaml").write_text(
        "rows:\n  - {table: 1, dataset: d, metric: BLEU, system: s, value: 9, source: paper}\n"
    )
    experiment = collect(run.grid(compare({"table": "1"}, {"softmax": "s"}), source="elsewhere/spec.yaml"))
    number = comparison(experiment).of(group(experiment.cells)[0])
    assert number is not None
    assert number.text == "9"


def test_speeds_and_sizes_of_the_paper_stand_beside_ours(run_folder):
    run = run_folder()
    ours = {"valid/bleu": 80.5, "valid/exact": 61.25, "train/seconds_per_epoch": 41.03, "best/epoch": 4}
    run.add("LSTM", bleu=2.0, metrics={**ours, "params": 30_019_166})
    run.add("Transformer", bleu=80.0, metrics={**ours, "params": 79_127_134})
    table = compare(
        {"table": "1", "metric": "BLEU_0to1"}, {"LSTM": "LSTM (no attention)", "Transformer": "Transformer"}
    )
    table |= {"value": ["valid/bleu", "valid/exact"], "extra": ["train/seconds_per_epoch", "best/epoch", "params"]}
    folder = run.grid(table, source=str(EXPERIMENTS / "copy_seq2seq" / "spec.yaml"))
    head, _, *lines = [
        [field.strip() for field in line.split("|")[1:-1]] for line in render(folder, "md").splitlines() if "|" in line
    ]
    assert head == [
        "label", "valid BLEU", "paper valid BLEU", "valid exact match", "train s/epoch", "paper train s/epoch",
        "best epoch", "paper best epoch", "parameters", "paper parameters",
    ]  # fmt: skip
    assert [line[2].strip("*") for line in lines] == ["3", "83.92"]  # the paper's run to 1
    assert [line[5].strip("*") for line in lines] == ["50", "66"]
    assert [line[7].strip("*\\") for line in lines] == [">500", "6"]
    assert [line[8] for line in lines] == ["30,019,166", "79,127,134"]
    assert [line[9].strip("*") for line in lines] == ["30,019,166", "79,127,134"]
    assert lines[0][3:5] == ["**61.25 (1)**", "41.03"]
    content = json.loads(render(folder, "json"))["results"]["LSTM"]["paper"]
    assert {name: number["value"] for name, number in content.items()} == {
        "valid/bleu": 0.03, "train/seconds_per_epoch": 50, "best/epoch": ">500", "params": 30_019_166,
    }  # fmt: skip
    assert any("BLEU runs from 0 to 1" in line for line in render(folder, "md").splitlines())
    assert any(line.endswith("table 1, BLEU\\_0to1, times 100") for line in render(folder, "md").splitlines())


def test_a_row_that_the_map_misspells_is_told(run_folder):
    run = run_folder()
    run.add("softmax")
    where = {"table": "4", "dataset": "iwslt14_de_en", "metric": "BLEU"}
    _, notes = numbers(run, compare(where, {"sofmax": "Transformer", "sparsemax": "Sparsemax"}))
    assert "table.compare.map: no row is called 'sofmax'; did you mean 'softmax'?" in notes
    assert not any("'sparsemax'" in note for note in notes)  # a table may have fewer rows than its map


@pytest.mark.parametrize(
    ("corpus", "told"),
    [("iwslt14-de-en", False), ("demo", True), ("multi30k-de-en", True), ("parallel", False)],
    ids=str,
)
def test_numbers_of_another_corpus_are_told(run_folder, corpus: str, told: bool):
    """As when a spec's dataset is replaced on the command line."""
    run = run_folder()
    path = run.add("softmax", 1, 30.0) / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "data": {**result["data"], "folder": f"{corpus}/abc"}}))
    where = {"table": "4", "dataset": "iwslt14_de_en", "metric": "BLEU"}
    _, notes = numbers(run, compare(where, {"softmax": "Transformer"}))
    assert (f"the paper's numbers are of iwslt14_de_en, these results of {corpus}" in notes) == told


def test_every_corpus_of_a_packaged_comparison_is_known_by_its_name():
    for path in sorted(EXPERIMENTS.glob("*/*.yaml")):
        spec, _ = parse_yaml(path.read_text(encoding="utf-8"), path.name)
        compared = (spec.get("table") or {}).get("compare") or {}
        if theirs := dict(compared).get("where", {}).get("dataset"):
            given = spec["task"]["dataset"]
            ours = given if isinstance(given, str) else given["kind"]
            assert compare_module._CORPORA.get(theirs, theirs.replace("_", "-")) == ours, path


def test_a_map_of_k_is_of_the_budget_and_of_no_other_axis(run_folder):
    run = run_folder()
    for layers in (2, 4):
        for budget in (2, 4, 3):
            axes = {"model.layers": layers, "model.attention.default.budget": budget}
            run.add(f"layers-{layers} budget-{budget}", 1, 30.0, axes=axes)
    where = {"table": "1", "dataset": "iwslt17_fr_en", "metric": "BLEU", "system": "Top-k Selective"}
    found, notes = numbers(run, compare(where, {"2": "2", "4": "4"}))
    assert set(found.values()) == {None}
    assert "no paper numbers along model.layers: the table of the paper does not vary it" in notes
