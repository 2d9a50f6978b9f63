"""Tables in every format, compared exactly where they are small."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from attnbench.core.errors import AttnbenchError, SpecError
from attnbench.report.table import FORMATS, render, render_terminal, report, write_results

BUDGET = "model.attention.default.budget"
PLACE = "model.attention.default"
PAPER = "paper: A paper (2020)\nrows:\n" + "".join(
    f"  - {{table: '1', dataset: d, metric: BLEU, system: {system}, k: {k}, value: {value}, source: {source}}}\n"
    for system, k, value, source in (("Dense", "full", 35.3, "paper"), ("Top-k", 8, 35.6, "recalled"))
)
COMPARE = {"file": "reported.yaml", "where": {"table": "1"}, "map": {"dense": "Dense", "topk-8": "Top-k"}}

GOLDEN_LIST = """\
### demo

| label | test BLEU | paper | attended enc/dec/cross | entropy enc/dec/cross | train ktok/s | decode ktok/s |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| dense | **35.53 ± 0.55 (3)** | *35.3* | 8.0/5.2/7.9 | 1.20/0.80/1.00 | 12.3 | 0.99 |
| topk-8 | 35.50 ± 0.35 (2 of 3) | *35.6 (recalled)* | 8.0/5.2/7.9 | 1.20/0.80/1.00 | 12.3 | 0.99 |
| topk-1 | queued |  |  |  |  |  |

- failed: topk-8, seed 3: the loss is NaN at step 30 (encoder.0.self)
- not done yet, of 7 cells: 1 queued
- mean ± sample standard deviation (seeds); bold: best
- not tested, for want of common seeds, of saved lines that give the scores, or of 10 lines: topk-8 (test BLEU)
- test BLEU: nrefs:1\\|case:lc\\|eff:no\\|tok:none\\|smooth:none\\|version:2.6.0
- attended: positions with weight above 0, mean over the queries of 256 sentences of the validation set
- paper: A paper (2020); table 1
- recalled: from memory of the paper, never checked against a copy
- commit 0123456789ab; data corpus/aaaaaaaaaaaa; 5 min in all
"""


@pytest.fixture
def compared(sweep, tmp_path: Path) -> Path:
    (tmp_path / "reported.yaml").write_text(PAPER)
    return sweep.grid({"compare": COMPARE}, source=str(tmp_path / "spec.yaml"))


@pytest.fixture
def pivot(run_folder, attention) -> Path:
    """Two mechanisms by three budgets, seeds 1 and 2; one cell failed, one was never in the grid."""
    run = run_folder()
    for label, scores in (("window", {16: 30.0, 8: 29.0, 4: 20.0}), ("top-k", {16: 31.0, 8: 28.5})):
        for budget, bleu in scores.items():
            axes = {PLACE: label, BUDGET: budget}
            run.add(f"{label}-{budget}", 1, bleu, axes=axes, metrics=attention)
            run.add(f"{label}-{budget}", 2, bleu + 1, axes=axes, metrics=attention)
    folder = run.add("top-k-inf", 1, axes={PLACE: "top-k", BUDGET: "inf"})
    folder.mkdir()
    (folder / "error.txt").write_text("killed")
    return run.grid({"cols": "budget"})


def test_a_list_is_the_golden_one(compared: Path):
    assert render(compared, "md") == GOLDEN_LIST


def test_a_pivot_is_the_golden_one(pivot: Path):
    head = render(pivot, "md").split("\n\n")
    assert head[0] == "### demo: test BLEU"
    assert head[1] == (
        "| label / budget | 16 | 8 | 4 | inf |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| window | 30.50 ± 0.71 (2) | **29.50 ± 0.71 (2)** | 20.50 ± 0.71 (2) |  |\n"
        "| top-k | **31.50 ± 0.71 (2)** | 29.00 ± 0.71 (2) |  | failed |"
    )
    assert head[2] == "### demo: attention and speed"
    assert "| top-k-8 | 8.0/5.2/7.9 | 1.20/0.80/1.00 | 12.3 | 0.99 |" in head[3]


def test_a_pivot_shows_the_paper_under_each_line(run_folder, tmp_path: Path):
    rows = "".join(
        f"  - {{table: 1, dataset: d, metric: BLEU, system: {system}, k: {k}, value: {value}, source: paper}}\n"
        for system, k, value in (("Window", 8, 37.03), ("Window", 4, 36.69), ("Top-k", 4, 37.25))
    )
    (tmp_path / "reported.yaml").write_text(f"rows:\n{rows}")
    run = run_folder()
    for label in ("window", "top-k", "random"):
        for budget in (8, 4):
            run.add(f"{label}-{budget}", 1, 30.0, axes={PLACE: label, BUDGET: budget})
    where = {"where": {"table": "1"}, "map": {"window": "Window", "top-k": "Top-k"}}
    table = {"cols": "budget", "compare": {"file": "reported.yaml", **where}}
    text = render(run.grid(table, source=str(tmp_path / "x.yaml")), "md")
    assert "| *window, paper* | *37.03* | *36.69* |\n| top-k |" in text
    assert "| *top-k, paper* |  | *37.25* |\n| random |" in text
    assert "random, paper" not in text


def test_a_pivot_ends_with_the_mean_of_a_line_where_asked(run_folder, tmp_path: Path):
    rows = "".join(
        f"  - {{table: 1, dataset: d, metric: BLEU, system: Window, k: {k}, value: {value}, source: paper}}\n"
        for k, value in ((8, 37.0), (4, 36.0), ("avg", 36.5))
    )
    (tmp_path / "reported.yaml").write_text(f"rows:\n{rows}")
    run = run_folder()
    for label, scores in (("window", (30.0, 29.0, 40.0)), ("random", (20.0, None, 41.0))):
        for budget, bleu in zip((8, 4, "inf"), scores, strict=True):
            run.add(f"{label}-{budget}", 1, bleu, axes={PLACE: label, BUDGET: budget})
    compare = {"file": "reported.yaml", "where": {"table": "1"}, "map": {"window": "Window"}}
    table = {"cols": "budget", "mean": True, "compare": compare}
    text = render(run.grid(table, source=str(tmp_path / "x.yaml")), "md")
    assert "| label / budget | 8 | 4 | inf | mean |" in text
    assert "29.00 (1) | 40.00 (1) | 29.50 |\n| *window, paper* | *37.0* | *36.0* |  | *36.5* |" in text
    assert "| random | 20.00 (1) | queued | **41.00 (1)** |  |" in text
    assert "- mean: of a line's columns, the dense model's apart" in text
    assert "mean:" not in render(run.grid({"cols": "budget"}), "md")


def test_a_pivot_of_one_line_is_a_list(sweep):
    text = render(sweep.grid({"cols": "budget"}), "md")
    assert [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")] == [
        "budget",
        "---",
        "inf",
        "8",
        "1",
    ]


def test_several_values_are_columns_with_directions_of_their_own(run_folder):
    run = run_folder()
    run.add("a", 1, 30.0, metrics={"valid/loss": 2.5, "attended/cross": 9.0, "params": 3_200_000})
    run.add("b", 1, 31.0, metrics={"valid/loss": 2.75, "attended/cross": 8.0, "params": 950})
    folder = run.grid({"value": ["valid/loss", "test/bleu", "attended/cross"], "extra": ["params", "test/chrf"]})
    text = render(folder, "md")
    assert "| a | **2.500 (1)** | 30.00 (1) | 9.0 (1) | 9.0 | 3,200,000 |  |" in text
    assert "| b | 2.750 (1) | **31.00 (1)** | 8.0 (1) | 8.0 | 950 |  |" in text
    assert "- no cell has measured test/chrf (measured: test/bleu, valid/loss)" in text


def noted(folder: Path, file: str, **more: Any) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **more}))


def test_code_that_was_another_for_some_cells_is_told(run_folder):
    run, own, other = run_folder(), "attnbench.attention.transforms.rectified", "attnbench.search.beam"
    for label, seed, hash in (("a", 1, "x"), ("a", 2, "y"), ("b", 1, "x")):
        noted(run.add(label, seed, 30.0), "result.json", mechanisms={own: hash, other: "same"})
    noted(run.add("old", 1, 30.0), "result.json")  # of before they were noted
    text = render(run.grid(), "md")
    assert f"- {own} was another file for some cells than for others (a, b \\| a); --fresh makes all" in text
    assert other not in text


def test_speeds_of_cells_that_had_others_beside_them_are_told(run_folder):
    run = run_folder()
    for seed, jobs in ((1, 1), (2, 2)):
        noted(run.add("a", seed, 30.0), "env.json", jobs=jobs)
    run.add("b", 1, 30.0)
    assert "- speeds of 1 of the 3 cells are of trainings with others beside them (--jobs)" in render(run.grid(), "md")
    for cell in run.cells:
        noted(run.root / "cells" / cell["folder"], "env.json", jobs=2)
    assert "- speeds are of trainings with others beside them (--jobs)" in render(run.root, "md")


def test_speeds_of_cells_whose_cores_others_used_are_told(run_folder):
    run = run_folder()
    for label, seed, shared in (("a", 1, 0.0), ("a", 2, 9.0), ("b", 1, 90.0), ("b", 2, 0.0)):
        noted(run.add(label, seed, 30.0, seconds=100.0), "result.json", shared_seconds=shared)
    told = "speeds of 1 of the 4 cells (b, seed 1) were measured while other programs used the same processor cores"
    assert f"- {told}" in render(run.grid(), "md")
    noted(run.root / "cells" / run.cells[2]["folder"], "result.json", shared_seconds=5.0)
    assert "other programs" not in render(run.root, "md")


def test_columns_that_tables_have_by_themselves_can_be_left_out(run_folder):
    run = run_folder()
    measured = {"attended/cross": 9.0, "entropy/cross": 1.5, "train/tokens_per_s": 3000.0}
    for row, name, score in (("x", "a", 30.0), ("x", "b", 31.0), ("y", "a", 32.0), ("y", "b", 33.0)):
        axes = {"model.norm": row, "model.tie": name}
        run.add(f"{row} {name}", 1, score, axes=axes, metrics=measured)
    shown = render(run.grid({"extra": ["params"]}), "md")
    assert all(title in shown for title in ("attended", "entropy", "train ktok/s", "parameters"))
    shown = render(run.grid({"extra": ["params"], "omit": ["attended", "train/tokens_per_s"]}), "md")
    titles = ("attended", "entropy", "ktok/s", "parameters")
    assert [title in shown for title in titles] == [False, True, False, True]
    everything = ["attended", "entropy", "train/tokens_per_s", "decode/tokens_per_s"]
    shown = render(run.grid({"rows": "norm", "cols": "tie", "omit": everything}), "md")
    assert shown.count("###") == 1  # no second sheet of nothing but names
    assert json.loads(render(run.root, "json"))["results"]["x a"]["attended/cross"] == 9.0


def test_what_a_table_is_about_stands_in_it_once(run_folder):
    run = run_folder()
    run.add("a", 1, 30.0, metrics={"train/tokens_per_s": 3000.0})
    folder = run.grid({"value": ["test/bleu", "train/tokens_per_s"], "extra": ["test/bleu"]})
    assert render(folder, "md").splitlines()[2] == "| label | test BLEU | train ktok/s |"


@pytest.mark.parametrize(
    ("reduce", "shown"), [("mean_std", "35.53 ± 0.55 (3)"), ("mean", "35.53 (3)"), ("max", "36.10 (3)")]
)
def test_reducers(sweep, reduce: str, shown: str):
    assert f"| dense | **{shown}** |" in render(sweep.grid({"reduce": reduce}), "md")


def test_the_best_seed_is_the_lowest_where_less_is_better(run_folder):
    run = run_folder()
    for seed, (a, b) in enumerate(((5.0, 8.0), (9.0, 8.0), (6.0, 8.0)), 1):
        run.add("a", seed, 30.0, metrics={"test/rep": a})
        run.add("b", seed, 30.0, metrics={"test/rep": b})
    text = render(run.grid({"value": "test/rep", "reduce": "max"}), "md")
    assert "| a | **5.00 (3)** |" in text
    assert "| b | 8.00 (3) |" in text


def test_equal_rows_are_both_the_best(run_folder):
    run = run_folder()
    for label, bleu in (("a", 30.0), ("b", 30.0), ("c", 20.0)):
        run.add(label, 1, bleu)
    ranks = report(run.grid()).ranks
    assert [ranks[label, "test/bleu"].kind for label in "abc"] == ["best", "best", "worse"]


def test_rows_of_other_corpora_are_not_compared(run_folder):
    run = run_folder()
    for name, bleu, longest in (("a", 30.0, 10), ("b", 50.0, 50), ("c", 45.0, 50)):
        folder = run.add(name, 1, bleu, axes={"task.dataset.longest": longest, PLACE: name}, data=f"{longest}" * 6)
        (folder / "spec.yaml").write_text(f"task: {{dataset: {{longest: {longest}, train: {name}}}}}\n")
    ranks = report(run.grid(), lambda metric, best, other: 0.001).ranks
    assert {row: rank.kind for (row, _), rank in ranks.items()} == {"b": "best", "c": "worse"}


def test_rows_that_are_scored_otherwise_are_not_compared(run_folder):
    """As with an axis of the task's ways of scoring: the easier one would be the best."""
    run = run_folder()
    for name, bleu, way in (("a", 18.0, "none"), ("b", 100.0, "13a"), ("c", 17.0, "none")):
        signature = f"nrefs:1|case:lc|eff:no|tok:{way}|smooth:none|version:2.6.0"
        run.add(name, 1, bleu, axes={"task.bleu": way, PLACE: name}, signature=signature)
    ranks = report(run.grid(), lambda metric, best, other: 0.001).ranks
    assert {row: rank.kind for (row, _), rank in ranks.items()} == {"a": "best", "c": "worse"}


@pytest.mark.parametrize(
    ("datasets", "compared"),
    [
        (({"kind": "parallel", "train": "x", "test": "t"}, {"kind": "parallel", "train": "y", "test": "t"}), True),
        (({"kind": "parallel", "train": "x", "test": "t"}, {"kind": "parallel", "train": "x", "test": "u"}), False),
        (({"kind": "parallel", "train": "x"}, {"kind": "parallel", "train": "y"}), False),  # tests are held out of it
        (({"kind": "demo", "pairs": 100}, {"kind": "demo", "pairs": 900}), True),
        (("multi30k-de-en", "multi30k-fr-en"), False),
    ],
)
def test_a_corpus_is_what_the_scores_are_of(run_folder, datasets, compared: bool):
    run = run_folder()
    for name, dataset in zip("ab", datasets, strict=True):
        folder = run.add(name, 1, 30.0 + (name == "b"), axes={"task.dataset.x": name}, data=name * 12)
        (folder / "spec.yaml").write_text(json.dumps({"task": {"dataset": dataset}}))
    assert bool(report(run.grid(), lambda metric, best, other: 0.001).ranks) == compared


def test_one_run_under_two_labels_has_taken_its_time_once(run_folder):
    run = run_folder()
    for label in "ab":
        run.add(label, 1, 30.0, seconds=600.0)
    run.cells[1]["digest"] = run.cells[0]["digest"]
    path = run.root / "cells" / "b-s1" / "result.json"
    path.write_text(path.read_text().replace('"db-s1"', '"da-s1"'))
    folder = run.grid()
    assert json.loads(render(folder, "json"))["total_seconds"] == 600.0
    assert "10 min in all" in render(folder, "md")


def test_tied_rows_are_underlined_and_worse_ones_are_not(run_folder):
    run = run_folder()
    for label, bleu in (("a", 30.0), ("b", 29.0), ("c", 20.0), ("d", 28.0)):
        run.add(label, 1, bleu)
    made = report(run.grid(), lambda metric, best, other: {"b": 0.4, "c": 0.001}.get(other.label))
    text = made.text("md")
    assert "| a | **30.00 (1)** |" in text
    assert "| b | <ins>29.00 (1)</ins> |" in text
    assert "| c | 20.00 (1) |" in text
    assert "| d | 28.00 (1) |" in text
    assert "underlined: not significantly worse" in text
    results = json.loads(made.text("json"))["results"]
    assert [results[label].get("test/bleu_p") for label in "abcd"] == [None, 0.4, 0.001, None]
    assert r"\underline{29.00 (1)}" in made.text("tex")


def test_json_has_the_shape_of_the_conventions(compared: Path):
    content = json.loads(render(compared, "json"))
    assert set(content) == {
        *(
            "schema_version",
            "name",
            "results",
            "configs",
            "metrics",
            "data",
            "git_hash",
            "dirty",
            "date",
            "env",
            "command",
        ),
        "total_seconds",
    }
    assert list(content["results"]) == ["dense", "topk-8", "topk-1"]
    dense = content["results"]["dense"]
    assert dense["test/bleu"] == pytest.approx(35.5333333333)
    assert dense["test/bleu_std"] == pytest.approx(0.5507570547)
    assert dense["n_seeds"] == 3
    assert [dense["per_seed"][seed]["test/bleu"] for seed in ("1", "2", "3")] == [35.0, 35.5, 36.1]
    assert dense["paper"]["test/bleu"]["value"] == 35.3
    assert content["results"]["topk-8"]["paper"]["test/bleu"]["source"] == "recalled"
    assert content["results"]["topk-8"]["unfinished"] == {
        "3": {"status": "failed", "reason": "the loss is NaN at step 30 (encoder.0.self)"}
    }
    assert content["results"]["topk-1"]["n_seeds"] == 0
    assert content["configs"]["dense"] == {"name": "x", "model": {"kind": "lstm", "k": "inf"}}
    assert content["metrics"]["test/bleu"]["higher_is_better"] is True
    assert "case:lc" in content["metrics"]["test/bleu"]["signature"]
    assert content["metrics"]["attended/cross"]["higher_is_better"] is None
    assert content["data"]["folder"] == "corpus/aaaaaaaaaaaa"
    assert content["data"]["n_samples"] == {"test": 3, "attended": 256}
    assert content["git_hash"] == "0123456789abcdef"
    assert content["date"] == "2026-01-03T00:00:00+00:00"
    assert content["env"]["device"] == "cpu"
    assert content["total_seconds"] == 300.0


def test_what_is_not_finite_is_null_in_json(run_folder):
    run = run_folder()
    run.add("a", 1, float("nan"))
    run.add("b", 1, 30.0)
    content = json.loads(render(run.grid(), "json"))
    assert content["results"]["a"]["test/bleu"] is None
    assert content["results"]["a"]["per_seed"]["1"]["test/bleu"] is None
    assert "| a | nan (1) |" in render(run.root, "md")


def test_csv_parses_back_in_full_precision(compared: Path):
    rows = list(csv.DictReader(io.StringIO(render(compared, "csv"))))
    assert [row["row"] for row in rows] == ["dense", "topk-8", "topk-1"]
    assert [row[BUDGET] for row in rows] == ["inf", "8", "1"]
    assert float(rows[0]["test/bleu"]) == sum((35.0, 35.5, 36.1)) / 3
    assert rows[0]["test/bleu_std"].startswith("0.55075705472861")
    assert (rows[1]["status"], rows[1]["n_seeds"], rows[1]["n_cells"]) == ("partial", "2", "3")
    assert rows[1]["reason"] == "the loss is NaN at step 30 (encoder.0.self)"
    assert (rows[1]["paper/test/bleu"], rows[1]["paper/test/bleu_source"]) == ("35.6", "recalled")
    assert rows[2]["test/bleu"] == ""


@pytest.mark.parametrize("label", ["[a] b", "*soft*", "a"])
def test_no_row_of_tex_begins_with_what_the_command_before_would_take(run_folder, label):
    """`\\\\[a]` is a break of the height a, and `\\\\*` one that no page ends at."""
    run = run_folder()
    run.add("b", 1, 29.0)
    run.add(label, 1, 30.0)
    text = render(run.grid({"rows": "label"}), "tex")
    assert not re.search(r"(\\\\|\\midrule)\s*[\[*]", text)
    assert f"{label} & " in text


def test_tex_is_balanced_and_escaped(run_folder):
    run = run_folder(name="a_b/100%_&_{#}$~^\\")
    for seed in (1, 2):
        run.add("top_k & 50% {#1} $x$ ~ ^ \\ <|>", seed, 30.0 + seed)
    run.add("b", 1, 29.0)
    text = render(run.grid({"rows": "label"}), "tex")
    assert re.findall(r"\\(begin|end)\{(\w+)\}", text) == [
        *(("begin", "table"), ("begin", "tabular")),
        *(("end", "tabular"), ("end", "table")),
    ]
    bare = re.sub(r"\\[&%$#_{}\\]|^% needs.*$", "", text, flags=re.M)
    assert bare.count("{") == bare.count("}")
    assert not re.search(r"[#_%~]", bare)
    assert bare.count("$") == 2 * text.count(r"$\pm$")
    assert "±" not in text
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)
    assert columns is not None
    assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {len(columns[1])}
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(f"\\{rule}") == 1


def test_terminal_fits_the_width_and_says_what_gave_way(compared: Path):
    for width, hidden in ((60, True), (80, True), (160, False)):
        console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=True)
        render_terminal(compared, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        table = text.split("failed:")[0]
        assert max(len(line) for line in table.splitlines()) <= width
        assert "35.53 ± 0.55 (3)" in table
        assert ("no room for: " in text) == hidden
        assert "\x1b" not in text
        if width == 80:  # what matters most gives way last
            assert "paper" in table
            assert "no room for: entropy" in " ".join(text.split())


def test_columns_that_were_asked_for_never_give_way(sweep):
    console = Console(width=30, file=io.StringIO(), force_terminal=True)
    render_terminal(sweep.grid({"extra": ["decode/tokens_per_s"]}), console)
    hidden = " ".join(console.file.getvalue().split()).split("no room for: ")[1]  # type: ignore[attr-defined]
    assert "train ktok/s" in hidden
    assert "decode" not in hidden


def test_a_pipe_gets_every_column(compared: Path):
    console = Console(file=io.StringIO(), soft_wrap=True)
    render_terminal(compared, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    line = next(line for line in text.splitlines() if "topk-8 " in line and "failed" not in line)
    assert re.split(r"\s{2,}", line.strip()) == [
        *("topk-8", "35.50 ± 0.35 (2 of 3)", "35.6 (recalled)", "8.0/5.2/7.9", "1.20/0.80/1.00", "12.3", "0.99")
    ]
    assert "no room" not in text


def test_results_are_written_whole_and_are_the_same_again(compared: Path):
    paths = write_results(compared)
    assert [path.name for path in paths] == ["results.json", "results.csv", "results.md", "results.tex"]
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in write_results(compared)] == first
    for format, content in zip(FORMATS, first, strict=True):
        assert render(compared, format).encode() == content
    assert not [path for path in compared.iterdir() if path.name.startswith(".")]


def test_a_refused_mixture_leaves_old_results_alone(sweep):
    folder = sweep.grid()
    write_results(folder)
    before = (folder / "results.md").read_bytes()
    sweep.add("other", 1, 30.0, signature="tok:13a")
    sweep.grid()
    with pytest.raises(AttnbenchError, match="other-s1"):
        write_results(folder)
    assert (folder / "results.md").read_bytes() == before


def test_an_unknown_format_names_the_known(sweep):
    with pytest.raises(SpecError, match="did you mean 'tex'"):
        render(sweep.grid(), "latex")


def test_nothing_done_is_still_a_table(run_folder):
    run = run_folder()
    run.add("a")
    run.add("b")
    folder = run.grid()
    assert "| a | queued |" in render(folder, "md")
    assert len(write_results(folder)) == 4


def test_speeds_on_different_devices_are_said(run_folder):
    run = run_folder()
    run.add("a", 1, 30.0)
    (run.add("b", 1, 31.0) / "env.json").write_text('{"device": "cuda"}')
    assert "- speeds were measured on different machines: cpu, threads 1; cuda" in render(run.grid(), "md")
    left_out = {"omit": ["train/tokens_per_s", "decode/tokens_per_s"]}
    assert "speeds were" not in render(run.grid(left_out), "md")
    assert "speeds were" in render(run.grid({**left_out, "extra": ["train/seconds_per_epoch"]}), "md")


def test_cells_that_were_trained_in_float32_though_they_ask_for_bfloat16_are_said(run_folder):
    run = run_folder()
    for label, asked, used in (
        ("a", "bf16", ["bf16"]), ("b", "bf16", ["fp32"]), ("c", "fp32", ["fp32"]), ("d", "bf16", ["bf16", "fp32"]),
    ):  # fmt: skip
        folder = run.add(label, 1, 30.0, metrics={"train/steps": 900})
        (folder / "spec.yaml").write_text(f"train: {{precision: {asked}}}\n")
        attempts = [{"from_step": 900 * at, "device": "cpu", "precision": each} for at, each in enumerate(used)]
        (folder / "env.json").write_text(json.dumps({"attempts": attempts}))  # d came back to be scored alone
    assert "- trained in float32 for want of bfloat16 instructions: b, seed 1\n" in render(run.grid(), "md")


def test_cells_that_were_searched_in_float32_though_they_ask_for_bfloat16_are_said(run_folder):
    run = run_folder()
    for label, asked, used in (
        ("a", "bf16", ["fp32", "bf16"]), ("b", "bf16", ["bf16", "fp32"]), ("c", "fp32", ["fp32"]),
        ("d", "bf16", [None]),
    ):  # fmt: skip
        folder = run.add(label, 1, 30.0)
        (folder / "spec.yaml").write_text(f"search: {{precision: {asked}}}\n")
        attempts = [{"device": "cpu", **({"search_precision": each} if each else {})} for each in used]
        (folder / "env.json").write_text(json.dumps({"attempts": attempts}))  # the last one searched
    assert "- searched in float32 for want of bfloat16 instructions: b, seed 1\n" in render(run.grid(), "md")


def test_a_cell_resumed_elsewhere_tells_all_of_its_places(run_folder):
    run = run_folder()
    attempts = [
        {"from_step": 0, "device": "cpu", "commit": "a" * 40, "dirty": True},
        {"from_step": 50, "device": "cuda", "commit": "b" * 40, "dirty": False},
    ]
    (run.add("a", 1, 30.0) / "env.json").write_text(json.dumps({"attempts": attempts}))
    text = render(run.grid(), "md")
    assert "speeds were measured on different machines: cpu; cuda" in text
    assert f"commit {'a' * 12}+changes, {'b' * 12};" in text
    assert json.loads(render(run.root, "json"))["env"]["device"] == ["cpu", "cuda"]


def diverged(step: int, epoch: int) -> dict[str, object]:
    seen = "output of encoder.0 is not finite"
    text = f"diverged at step {step}, in epoch {epoch}: {seen}"
    return {"kind": "diverged", "step": step, "epoch": epoch, "text": text, "seen": seen}


@pytest.fixture
def broken(run_folder) -> Path:
    """Two seeds of which one diverged; a row that diverged at once; one of an older result; one stopped early."""
    run = run_folder()
    run.add("budget-4", 1, 30.0, outcome={"kind": "finished", "text": "finished at step 3000", "step": 3000})
    run.add("budget-4", 2, 20.0, outcome=diverged(1200, 3))
    run.add("budget-2", 1, 0.0, outcome=diverged(30, 1), weights=())
    run.add("budget-1", 1, 10.0, outcome="diverged at step 7: the loss itself is not finite")
    run.add("patient", 1, 25.0, outcome={"kind": "stopped_early", "text": "stopped early at step 8: no better"})
    return run.grid()


NOTES = (
    "budget-4, seed 2: diverged at step 1200, in epoch 3: output of encoder.0 is not finite; "
    "scored from its best checkpoint, step 1000",
    "budget-2, seed 1: diverged at step 30, in epoch 1: output of encoder.0 is not finite; "
    "no checkpoint lies before it: no scores",
    "budget-1, seed 1: diverged at step 7: the loss itself is not finite; scored from its best checkpoint, step 1000",
    "stopped early, by patience: 1 of 5 cells",
)


@pytest.mark.parametrize("format", ["md", "tex", "terminal"])
def test_every_table_tells_what_diverged(broken: Path, format: str):
    if format == "terminal":
        out = io.StringIO()
        render_terminal(broken, Console(file=out, width=80))
        text = out.getvalue()
    else:
        text = render(broken, format)
    lines = text.replace("\\_", "_").splitlines()
    for note in NOTES:
        assert sum(note in line for line in lines) == 1, note
    (row,) = [line for line in lines if "budget-2" in line and "seed" not in line]
    assert "diverged" in row


def test_programs_read_what_diverged(broken: Path):
    rows = json.loads(render(broken, "json"))["results"]
    assert rows["budget-4"]["outcomes"]["2"] == diverged(1200, 3)
    assert rows["budget-4"]["outcomes"]["1"]["kind"] == "finished"
    assert rows["budget-2"]["outcomes"]["1"]["epoch"] == 1
    assert "test/bleu" not in rows["budget-2"]
    assert rows["budget-1"]["outcomes"]["1"]["kind"] == "diverged"
    table = {row["row"]: row for row in csv.DictReader(io.StringIO(render(broken, "csv")))}
    assert table["budget-4"]["outcome"] == (
        "seed 1 finished at step 3000; seed 2 diverged at step 1200, in epoch 3: output of encoder.0 is not finite"
    )
    assert table["budget-2"]["outcome"].startswith("diverged at step 30, in epoch 1")
    assert table["budget-2"]["test/bleu"] == ""


def test_a_metric_that_is_misspelt_is_told_with_the_nearest(run_folder):
    run = run_folder()
    run.add("a", 1, 30.0, metrics={"attended/cross": 9.0})
    text = render(run.grid({"value": ["test/blue"], "extra": ["attendd/cross"]}), "md")
    assert "no cell has measured test/blue; did you mean test/bleu?" in text
    assert "no cell has measured attendd/cross; did you mean attended/cross?" in text


def test_rows_that_are_one_run_are_told(run_folder):
    run = run_folder()
    for label in ("budget-2 cross", "budget-8 cross", "budget-8 all"):
        folder = run.add(label, 1, 30.0)
        if label == "budget-8 cross":
            run.cells[-1]["digest"] = run.cells[0]["digest"]
            result = json.loads((folder / "result.json").read_text())
            (folder / "result.json").write_text(json.dumps({**result, "digest": run.cells[0]["digest"]}))
    text = render(run.grid(), "md")
    assert "the same run, under several labels: budget-2 cross = budget-8 cross" in text
    assert "budget-8 all;" not in text


def test_rows_that_differ_in_more_than_the_axes_are_told(run_folder):
    """As where one cell of a finished table was run again with other settings."""
    run = run_folder()
    for label, budget, steps in (("a", 2, 9), ("b", 4, 9), ("c", 8, 60)):
        folder = run.add(label, 1, 30.0, axes={BUDGET: budget})
        content = {"model": {"attention": {"default": {"budget": budget}}}, "train": {"max_steps": steps}}
        (folder / "spec.yaml").write_text(json.dumps(content))
    text = render(run.grid(), "md")
    assert "rows differ in what is no axis: train.max\\_steps is 9 in a, b; 60 in c" in text
    assert text.count("no axis") == 1


@pytest.mark.parametrize(("axis", "told"), [("cell", False), (PLACE, True)])
def test_whole_cells_may_differ_in_anything_and_all_rows_in_their_seeds(run_folder, axis: str, told: bool):
    run = run_folder()
    for seed, label in enumerate("ab", 1):
        folder = run.add(label, seed, 30.0, axes={axis: label})
        (folder / "spec.yaml").write_text(json.dumps({"train": {"max_steps": 9 + seed}, "seed": seed}))
    text = render(run.grid(), "md")
    assert text.count("no axis") == told
    assert ("train.max\\_steps is 10 in a; 11 in b" in text) == told


def test_a_metric_that_not_every_seed_has_says_of_how_many(run_folder):
    run = run_folder()
    run.add("a", 1, 30.0, metrics={"test/rep": 2.0})
    run.add("a", 2, 31.0)
    row = json.loads(render(run.grid(), "json"))["results"]["a"]
    assert (row["n_seeds"], row["test/rep_n"]) == (2, 1)
    assert "test/bleu_n" not in row


@pytest.mark.parametrize(("bound", "told"), [(79.38, True), (99.9, False)])
def test_what_a_perfect_output_would_have_is_told_where_it_is_less_than_all(run_folder, bound, told):
    run = run_folder()
    run.add("a", 1, 30.0, metrics={"test/bleu_13a": 31.0, "test/bleu_13a_bound": bound})
    page = render(run.grid({"value": "test/bleu_13a"}), "md")
    assert ("- test BLEU 13a: an output equal to its reference has 79.38, as its words" in page) is told


@pytest.mark.parametrize("samples", [{"test": 600}, {"test": 3000, "test/blocks": 600}])
@pytest.mark.parametrize(("cut", "told"), [(30, False), (31, True)])
def test_outputs_that_were_cut_off_are_told_where_they_are_many(run_folder, cut, told, samples):
    run = run_folder()
    for label, count in (("a", cut), ("b", 0)):
        run.add(label, 1, 30.0, metrics={"test/unfinished": count, "valid/unfinished": 600}, samples=samples)
    page = render(run.grid(), "md")
    assert ("- test: outputs cut off at the limit of the search: a, seed 1: 5%\n" in page) is told
    assert ("cut off" in page) is told


def test_markdown_shows_text_as_it_is(run_folder):
    run = run_folder()
    run.add("&apos; ~~gone~~", 1, 30.0)
    assert r"| \&apos; \~\~gone\~\~ |" in render(run.grid(), "md")
