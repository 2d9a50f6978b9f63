"""Two rows, chosen by their labels."""

from __future__ import annotations

import json
import math

import pytest

from attnbench.core.errors import DataError, SpecError
from attnbench.report.collect import collect
from attnbench.report.pair import compare_rows
from attnbench.report.rows import group
from attnbench.report.significance import PairedTests


@pytest.fixture
def folder(run_folder):
    run = run_folder()
    for seed, (one, other) in {1: (30.0, 33.0), 2: (31.0, 35.0), 3: (90.0, None)}.items():
        run.add("softmax", seed, one, metrics={"test/rep": 2.0, "params": 7})
        if other is not None:
            run.add("topk", seed, other, metrics={"test/rep": 1.5, "params": 7})
    run.add("waiting")
    return run.grid()


def test_means_are_of_the_seeds_that_both_have(folder):
    asked = []

    def judge(metric, first, second):
        asked.append((metric, first.label, second.label))
        return 0.25 if metric == "test/bleu" else None

    found = compare_rows(folder, "softmax", "topk", judge)
    assert found.seeds == (1, 2)
    bleu, rep = found.differences
    assert (bleu.metric, bleu.first, bleu.second, bleu.difference, bleu.p) == ("test/bleu", 30.5, 34.0, 3.5, 0.25)
    assert (rep.metric, rep.difference, rep.p) == ("test/rep", -0.5, None)  # and no size, which has no better side
    assert asked == [
        ("test/bleu", "softmax", "topk"), ("test/rep", "softmax", "topk"), ("test/rep", "topk", "softmax"),
    ]  # fmt: skip
    assert json.loads(json.dumps(found.dump()))["differences"][0]["p"] == 0.25
    (sheet,) = found.laid_out().sheets
    assert [[entry.text for entry in line] for line in sheet.lines] == [
        ["test BLEU", "30.50", "34.00", "+3.50", "0.250"], ["test REP", "2.00", "1.50", "-0.50", ""],
    ]  # fmt: skip


def test_p_is_that_of_the_table(run_folder):
    run, wanted = run_folder(), ["the cat sat on the mat", "a dog barked at me today"] * 20
    for label, lines in (("good", wanted), ("bad", ["the cat sat on a mat", "a dog barked at me yesterday"] * 20)):
        run.add(label, 1, scored(lines, wanted), lines=lines, references=wanted)
    folder = run.grid()
    first, second = group(collect(folder).cells)
    p = PairedTests(folder)("test/bleu", first, second)
    assert p is not None
    for order in (("good", "bad"), ("bad", "good")):
        found = next(each for each in compare_rows(folder, *order).differences if each.metric == "test/bleu")
        assert found.p == pytest.approx(p)


def scored(lines, references):
    from attnbench.metrics.bleu import corpus_bleu

    return corpus_bleu(lines, references, "tok_lc").value


def test_what_was_not_scored_alike_is_left_out_and_told(run_folder):
    run = run_folder()
    run.add("a", 1, 30.0, axes={"task.bleu": "tok_lc"}, metrics={"valid/loss": math.inf, "test/rep": 1.0})
    run.add("b", 1, 40.0, axes={"task.bleu": "tok"}, metrics={"valid/loss": 2.0, "test/rep": 1.0}, signature="another")
    found = compare_rows(run.grid(), "a", "b")
    assert found.unlike == ("test/bleu",)
    assert "left out, scored in different ways: test/bleu" in found.laid_out().notes
    loss = next(each for each in found.dump()["differences"] if each["metric"] == "valid/loss")
    assert (loss["first"], loss["second"], loss["difference"]) == (None, 2.0, None)


def test_a_metric_that_some_seeds_lack_is_left_out(run_folder):
    """Older results had fewer; the others' means are of all seeds."""
    run = run_folder()
    for label in ("a", "b"):
        run.add(label, 1, 30.0)
        run.add(label, 2, 30.0, metrics={"test/unfinished": 1.0})
    assert [each.metric for each in compare_rows(run.grid(), "a", "b").differences] == ["test/bleu"]


def test_rows_of_different_test_sets_are_not_compared(run_folder):
    run = run_folder()
    for name in ("a", "b"):
        run.add(name, 1, 30.0, axes={"task.dataset": name})
        spec = run.root / "cells" / f"{name}-s1" / "spec.yaml"
        spec.write_text(f"name: x\ntask: {{kind: translation, dataset: {{kind: {name}}}}}\ntable: {{rows: label}}\n")
    with pytest.raises(SpecError, match="'a' and 'b' have different test sets"):
        compare_rows(run.grid(), "a", "b")


def test_rows_that_diverged_are_told_to_have(run_folder):
    run = run_folder()
    run.add("a", 1, 30.0)
    run.add("b", 1, 0.0, weights=(), outcome={"kind": "diverged", "text": "diverged at update 5"})
    with pytest.raises(DataError, match=r"for both 'a' and 'b': one of them diverged"):
        compare_rows(run.grid(), "a", "b")


@pytest.mark.parametrize(
    ("labels", "error", "said"),
    [
        (("softmax", "tpok"), SpecError, "unknown row 'tpok'; did you mean 'topk'"),
        (("topk", "topk"), SpecError, "'topk' twice"),
        (("softmax", "waiting"), DataError, "no seed has scores for both .*; run them first"),
    ],
)
def test_what_cannot_be_compared_is_told(folder, labels, error, said):
    with pytest.raises(error, match=said):
        compare_rows(folder, *labels)


@pytest.mark.parametrize(("kind", "units"), [("document", "documents"), ("translation", "sentences")])
def test_what_is_tested_is_told(kind, units, run_folder):
    run = run_folder()
    for label in ("a", "b"):
        run.add(label, 1, 30.0, task=f"{{kind: {kind}}}")
    (told,) = compare_rows(run.grid(), "a", "b").laid_out().notes
    assert f"paired bootstrap over their {units}, two-sided" in told
