"""Which row is best, and which are level with it."""

from __future__ import annotations

import pytest

from attnbench.report.rank import Rank, rank
from attnbench.report.rows import Row, Stat
from attnbench.report.table import render


def row(label: str, metric: str, **seeds: float) -> Row:
    return Row(label, {}, (), {metric: Stat.of({int(name[1:]): value for name, value in seeds.items()})})


@pytest.mark.parametrize(("metric", "better", "worse"), [("test/bleu", 30.0, 20.0), ("test/rep", 20.0, 30.0)])
@pytest.mark.parametrize(("p", "kind"), [(0.049, "worse"), (0.05, "tied"), (None, "worse")])
def test_the_best_row_and_those_that_are_not_significantly_worse(metric, better, worse, p, kind):
    rows = [row("worse", metric, s1=worse), row("better", metric, s1=better)]
    asked = []

    def judge(name, best, other):
        asked.append((name, best.label, other.label))
        return p

    assert rank([(metric, rows)], "mean_std", judge) == {
        ("better", metric): Rank("best"), ("worse", metric): Rank(kind, p),
    }  # fmt: skip
    assert asked == [(metric, "better", "worse")]


@pytest.mark.parametrize(("metric", "good", "middle", "bad"), [("test/bleu", 30.0, 25.0, 20.0),
                                                               ("test/rep", 20.0, 25.0, 30.0)])  # fmt: skip
def test_what_is_better_on_the_common_seeds_is_not_called_worse(metric, good, middle, bad):
    """The best row by a seed that the other one lacks."""
    rows = [row("best", metric, s1=bad, s2=good, s3=good), row("level", metric, s1=middle)]
    ranks = rank([(metric, rows)], "mean_std", lambda *given: 0.01)
    assert ranks == {("best", metric): Rank("best"), ("level", metric): Rank("tied", 0.01)}
    rows = [row("best", metric, s1=good, s2=middle), row("other", metric, s1=middle)]
    assert rank([(metric, rows)], "mean_std", lambda *given: 0.01)["other", metric].kind == "worse"


def test_one_run_under_several_labels_has_no_rival(run_folder):
    run = run_folder()
    for label in ("a", "b"):
        run.add(label, 1, 30.0)
        run.cells[-1]["digest"] = "same"
        path = run.root / "cells" / f"{label}-s1" / "result.json"
        path.write_text(path.read_text().replace(f"d{label}-s1", "same"))
    assert "**" not in render(run.grid(), "md")
    run.add("c", 1, 20.0)
    assert render(run.grid(), "md").count("**30.00") == 2
