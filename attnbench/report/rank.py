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
    """best, or tied: the paired test does not tell the row from the best one. p: of that test."""

    kind: Literal["best", "tied", "worse"]
    p: float | None = None


Ranks = dict[tuple[str, str], Rank]
"""(row label, metric) -> its rank among the rows that it is compared with."""


def shown(row: Row, metric: str, reduce: str) -> float | None:
    """The one number of a row in a column, None where no cell has it."""
    stat = row.stats.get(metric)
    if stat is None:
        return None
    return stat.highest if reduce == "max" else stat.mean


def rank(contests: Iterable[tuple[str, Sequence[Row]]], reduce: str, judge: Judge) -> Ranks:
    """Ranks of every contest (metric, rows); none has a best row with fewer than two numbers."""
    ranks: Ranks = {}
    for metric, rows in contests:
        scores = {row.label: shown(row, metric, reduce) for row in rows}
        able = [row for row in rows if _finite(scores[row.label])]
        higher = higher_is_better(metric)
        if len(able) < 2 or higher is None:
            continue
        sign = 1 if higher else -1
        best = max(able, key=lambda row: sign * (scores[row.label] or 0.0))
        for row in able:
            if scores[row.label] == scores[best.label]:
                ranks[row.label, metric] = Rank("best")
            else:
                p = judge(metric, best, row)
                ranks[row.label, metric] = Rank("tied" if p is not None and p >= LEVEL else "worse", p)
    return ranks


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
