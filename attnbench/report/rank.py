"""Which row is best in a column, and which are not significantly worse than it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from attnbench.report.names import higher_is_better
from attnbench.report.rows import Row

LEVEL = 0.05
Judge = Callable[[str, Row, Row], float | None]
"""(metric, best, other) -> p of the paired test, None where there is nothing to test on."""


@dataclass(frozen=True)
class Rank:
    """best, or tied: the paired test does not find the row worse than the best one. p: of that test, two-sided."""

    kind: Literal["best", "tied", "worse"]
    p: float | None = None


Ranks = dict[tuple[str, str], Rank]
"""(row label, metric) -> its rank among the rows that it is compared with."""


def shown(row: Row, metric: str, reduce: str) -> float | None:
    """The one number of a row in a column, None where no cell has it."""
    stat = row.stats.get(metric)
    if stat is None:
        return None
    if reduce == "max":
        return stat.lowest if higher_is_better(metric) is False else stat.highest
    return stat.mean


def rank(contests: Iterable[tuple[str, Sequence[Row]]], reduce: str, judge: Judge) -> Ranks:
    """Ranks of every contest (metric, rows); none has a best row with fewer than two numbers."""
    ranks: Ranks = {}
    for metric, rows in contests:
        scores = {row.label: shown(row, metric, reduce) for row in rows}
        able = [row for row in rows if _finite(scores[row.label])]
        higher = higher_is_better(metric)
        runs = {tuple(cell.digest for cell in row.done if cell.digest) or row.label for row in able}
        if len(runs) < 2 or higher is None:  # rows may be one run under several labels
            continue
        sign = 1 if higher else -1
        best = max(able, key=lambda row: sign * (scores[row.label] or 0.0))
        for row in able:
            if scores[row.label] == scores[best.label]:
                ranks[row.label, metric] = Rank("best")
            else:
                p = judge(metric, best, row)
                level = p is not None and (p >= LEVEL or sign * _lead(metric, best, row) <= 0)
                ranks[row.label, metric] = Rank("tied" if level else "worse", p)
    return ranks


def _lead(metric: str, best: Row, other: Row) -> float:
    """How far `best` lies above `other` over their common seeds, which are what is tested; over all seeds, or by the
    best of them, it may be the other way."""
    ours, theirs = best.stats[metric].seeds, other.stats[metric].seeds
    return sum(ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys())


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
