"""Two rows of a table, metric by metric: how far they lie apart over their common seeds, and the paired test of it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnbench.core.errors import DataError, SpecError
from attnbench.core.spec import unknown
from attnbench.report import names
from attnbench.report.collect import collect
from attnbench.report.formats import Document
from attnbench.report.layout import Column, Entry, Sheet
from attnbench.report.notes import units
from attnbench.report.rank import Judge
from attnbench.report.rows import Row, group
from attnbench.report.significance import FEWEST, PairedTests, has_test


@dataclass(frozen=True)
class Difference:
    """Means over the seeds that both rows have, the second less the first, and p of the paired test, two-sided; None
    where the metric has none, or the saved outputs are not at hand."""

    metric: str
    first: float
    second: float
    difference: float
    p: float | None


@dataclass(frozen=True)
class Pair:
    """Two rows of the table `name`."""

    name: str
    first: str
    second: str
    seeds: tuple[int, ...]
    differences: tuple[Difference, ...]
    unlike: tuple[str, ...]
    """Metrics that the two were not scored on alike, and that are left out."""
    units: str
    """What p is tested over."""

    def dump(self) -> dict[str, Any]:
        """JSON-ready; numbers that JSON does not know become null."""
        whole = asdict(self)
        for each in whole["differences"]:
            each |= {key: None for key, value in each.items() if isinstance(value, float) and not math.isfinite(value)}
        return whole

    def laid_out(self) -> Document:
        titles = ("metric", self.first, self.second, "difference", "p")
        columns = tuple(Column(title, left=title == "metric") for title in titles)
        lines = tuple(_line(each) for each in self.differences)
        title = f"{self.name}: {self.second} against {self.first}"
        seeds = ", ".join(map(str, self.seeds))
        notes = (
            f"means of the seeds {seeds}; p: paired bootstrap over their {self.units}, two-sided; none: the "
            f"metric has no test, they are fewer than {FEWEST}, or the saved outputs are not here",
        )
        if self.unlike:
            notes += (f"left out, scored in different ways: {', '.join(self.unlike)}",)
        return Document(self.name, (Sheet(title, columns, lines),), notes)


def compare_rows(folder: Path, first: str, second: str, judge: Judge | None = None) -> Pair:
    """The rows of a run folder called `first` and `second`, in the metrics that have a better side and that every
    common seed has in both.

    Raises SpecError for a label that there is not, and for rows with different test sets; DataError where no seed is
    done in both.
    """
    experiment = collect(folder)
    rows = {row.label: row for row in group(experiment.cells)}
    if first == second:
        raise SpecError(f"--compare '{first}' twice: name two rows")
    for label in (first, second):
        if label not in rows:
            raise SpecError(f"--compare: {unknown('row', label, list(rows))}")
    ours, theirs = rows[first], rows[second]
    if ours.corpus != theirs.corpus:
        raise SpecError(
            f"--compare: '{first}' and '{second}' have different test sets; their scores cannot be compared"
        )
    seeds = {cell.seed for cell in ours.done if cell.scored} & {cell.seed for cell in theirs.done if cell.scored}
    if not seeds:
        both = {cell.seed for cell in ours.done} & {cell.seed for cell in theirs.done}
        why = "; run them first" if not both else ": one of them diverged before it could be scored"
        raise DataError(f"{folder}: no seed has scores for both '{first}' and '{second}'{why}")
    judge = judge or PairedTests(folder)
    metrics = [name for name in ours.stats if name in theirs.stats and names.higher_is_better(name) is not None]
    tested = sorted(metrics, key=lambda name: not has_test(name))  # these first
    whole = [name for name in tested if all(seeds <= row.stats[name].seeds.keys() for row in (ours, theirs))]
    unlike = tuple(
        name
        for name in whole
        if len(ours.signatures(name) | theirs.signatures(name)) > 1 or ours.basis(name) != theirs.basis(name)
    )
    found = tuple(_difference(name, ours, theirs, seeds, judge) for name in whole if name not in unlike)
    return Pair(experiment.name, first, second, tuple(sorted(seeds)), found, unlike, units([ours, theirs])[0])


def _difference(metric: str, first: Row, second: Row, seeds: set[int], judge: Judge) -> Difference:
    sides = first.stats[metric].seeds, second.stats[metric].seeds
    one, other = (math.fsum(side[seed] for seed in seeds) / len(seeds) for side in sides)
    p = judge(metric, first, second)
    if p is None:  # a copy without the corpus's text knows what was tested, in one order
        p = judge(metric, second, first)
    return Difference(metric, one, other, other - one, p)


def _line(each: Difference) -> tuple[Entry, ...]:
    values = (names.number(each.metric, value) for value in (each.first, each.second))
    sign = "+" if each.difference > 0 else ""
    apart = sign + names.number(each.metric, each.difference)
    p = Entry() if each.p is None else Entry(f"{each.p:.3f}")
    return (Entry(names.title(each.metric)), *map(Entry, values), Entry(apart), p)
