"""Statistics over seeds, and what may not stand in one table."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.core.errors import AttnbenchError
from attnbench.report.collect import collect
from attnbench.report.pair import compare_rows
from attnbench.report.rows import Stat, group
from attnbench.report.table import render

LC, RAW = (
    f"nrefs:1|case:{case}|eff:no|tok:{tok}|smooth:{smooth}|version:2.6.0"
    for case, tok, smooth in (("lc", "none", "none"), ("mixed", "13a", "exp"))
)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
@settings(max_examples=50, deadline=None)
def test_statistics_are_those_of_the_standard_library(values: list[float]):
    stat = Stat.of(dict(enumerate(values)))
    assert stat.n == len(values)
    assert math.isclose(stat.mean, statistics.mean(values), rel_tol=1e-9, abs_tol=1e-9)
    assert stat.std == statistics.stdev(values)
    assert stat.highest == max(values)


def test_one_seed_has_no_spread_and_infinity_no_deviation():
    assert Stat.of({1: 30.0}).std is None
    spoilt = Stat.of({1: 30.0, 2: math.inf})
    assert (spoilt.mean, spoilt.std) == (math.inf, None)


def test_cells_that_differ_in_the_seed_alone_are_a_row(sweep):
    rows = group(collect(sweep.grid()).cells)
    assert [(row.label, row.status, len(row.done), len(row.cells)) for row in rows] == [
        ("dense", "done", 3, 3),
        ("topk-8", "partial", 2, 3),
        ("topk-1", "queued", 0, 1),
    ]
    assert rows[0].stats["test/bleu"].seeds == {1: 35.0, 2: 35.5, 3: 36.1}
    assert rows[0].coordinate("budget") == ("model.attention.default.budget", "inf")
    assert rows[0].coordinate("slots") == (None, None)


def test_rows_of_one_label_are_told_apart_by_their_axes(run_folder):
    run = run_folder()
    for value in ("train", "both"):
        run.add(
            "topk", 1 if value == "train" else 2, 30.0, axes={"model.attention.sparsify": value, "model.kind": "lstm"}
        )
    assert [row.label for row in group(collect(run.grid()).cells)] == ["topk (sparsify=train)", "topk (sparsify=both)"]


def test_two_signatures_are_refused_by_name(run_folder):
    run = run_folder()
    run.add("dense", 1, 35.0)
    run.add("topk-8", 1, 36.0, signature="nrefs:1|case:mixed|tok:13a")
    with pytest.raises(AttnbenchError, match=r"(?s)signature of test/bleu.*case:lc.*dense-s1.*tok:13a.*topk-8-s1"):
        group(collect(run.grid()).cells)


def test_two_data_hashes_are_refused_by_name(run_folder):
    run = run_folder()
    run.add("dense", 1, 35.0)
    run.add("dense", 2, 35.0, data="bbbbbbbbbbbb")
    with pytest.raises(
        AttnbenchError, match=r"(?s)the data \(folder\).*corpus/aaaaaaaaaaaa: dense-s1.*bbbbbbbbbbbb: dense-s2"
    ):
        group(collect(run.grid()).cells)


def test_an_axis_of_the_task_may_change_the_data(run_folder):
    run = run_folder()
    run.add("short", 1, 35.0, axes={"task.length": 10})
    run.add("long", 1, 30.0, axes={"task.length": 50}, data="bbbbbbbbbbbb")
    assert len(group(collect(run.grid()).cells)) == 2
    run.add("long-too", 1, 30.0, axes={"task.length": 50}, data="cccccccccccc")
    with pytest.raises(AttnbenchError, match="long-s1"):
        group(collect(run.grid()).cells)


def test_an_axis_of_whole_cells_changes_the_data_where_its_cells_say_so(run_folder):
    run = run_folder()
    for name, longest, data in (("a", 10, "a" * 12), ("b", 50, "b" * 12), ("c", 50, "b" * 12)):
        folder = run.add(name, 1, 35.0, axes={"cell": name}, data=data)
        (folder / "spec.yaml").write_text(f"task: {{dataset: {{longest: {longest}}}}}\n")
    assert len(group(collect(run.grid()).cells)) == 3
    folder = run.add("d", 1, 30.0, axes={"cell": "d"}, data="d" * 12)
    (folder / "spec.yaml").write_text("task: {dataset: {longest: 10}}\n")
    with pytest.raises(AttnbenchError, match="d-s1"):
        group(collect(run.grid()).cells)


def test_cells_that_are_not_done_mix_with_anything(run_folder):
    run = run_folder()
    run.add("dense", 1, 35.0)
    run.add("topk-8", 1, signature="other", data="bbbbbbbbbbbb")
    assert [row.status for row in group(collect(run.grid()).cells)] == ["done", "queued"]


def spec_of(folder: Path, **train: object) -> None:
    (folder / "spec.yaml").write_text(json.dumps({"train": {"max_steps": 9, **train}, "seed": int(folder.name[-1])}))


def test_cells_of_other_settings_are_no_seeds_of_one_system(run_folder):
    run = run_folder()
    spec_of(run.add("dense", 1, 35.0))
    spec_of(run.add("dense", 2, 36.0), lr=0.1)  # a field that only one version knew says nothing
    assert group(collect(run.grid()).cells)[0].stats["test/bleu"].n == 2
    spec_of(run.add("dense", 3, 36.0), max_steps=60)
    with pytest.raises(AttnbenchError, match=r"(?s)train.max_steps of one row.*9: dense-s1, dense-s2\n.*60: dense-s3"):
        group(collect(run.grid()).cells)


def test_one_seed_stands_once_in_a_row(run_folder):
    """As where tables of two versions of a spec were saved into one folder."""
    run = run_folder()
    run.add("dense", 1, 35.0)
    run.add("dense", 2, 36.0)
    run.cells[1]["seed"] = 1
    with pytest.raises(AttnbenchError, match=r"(?s)seed 1 stands twice in one row.*ddense-s1: .*ddense-s2: "):
        group(collect(run.grid()).cells)


@pytest.mark.parametrize(("part", "other"), [("folder", "corpus/bbb"), ("digest", "bbb"), ("content_sha256", "e" * 64)])
def test_other_data_are_refused_by_what_parts_them(run_folder, part, other):
    run = run_folder()
    for label in ("dense", "topk-8"):
        run.add(label, 1, 35.0)
    path = run.root / "cells" / "topk-8-s1" / "result.json"
    for data in ("d", other):
        content = json.loads(path.read_text())
        for cell in ("dense", "topk-8"):
            at = run.root / "cells" / f"{cell}-s1" / "result.json"
            own = {**content["data"], "digest": "d", **({part: data} if cell == "topk-8" and data == other else {})}
            at.write_text(json.dumps({**json.loads(at.read_text()), "data": own}))
    with pytest.raises(AttnbenchError, match=rf"the data \({part}\) differs"):
        group(collect(run.grid()).cells)


VOCABULARIES = [
    f"{{kind: translation, dataset: {{kind: multi30k}}, tokenizer: {{kind: bpe, vocab: {vocab}}}}}" for vocab in (1, 2)
]
HYPHENS = [f"{{kind: translation, dataset: {{kind: multi30k}}, split_hyphens: {said}}}" for said in ("false", "true")]


@pytest.mark.parametrize(
    ("tasks", "metric", "signature", "apart"),
    [
        (VOCABULARIES, "valid/ppl", LC, True),  # of other tokens
        (VOCABULARIES, "test/rep", LC, False),
        (VOCABULARIES, "test/bleu", LC, False),
        (HYPHENS, "test/bleu", LC, True),  # of other words
        (HYPHENS, "test/bleu", RAW, False),
        (HYPHENS, "test/rep", LC, True),
        (HYPHENS, "valid/loss", LC, True),
    ],
)
def test_numbers_that_count_other_things_are_not_compared(tasks, metric, signature, apart, run_folder):
    run = run_folder()
    for label, bleu, task in zip("ab", (30.0, 40.0), tasks, strict=True):
        more = {} if metric == "test/bleu" else {metric: bleu}
        run.add(label, 1, bleu, axes={"task.x": label}, metrics=more, signature=signature, task=task)
    page = render(run.grid({"value": metric}), "md")
    assert ("**" not in page) is apart
    assert ("other words or tokens are not compared in" in page) is apart
    assert (metric in compare_rows(run.root, "a", "b").unlike) is apart
