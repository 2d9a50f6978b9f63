"""Rows laid out for people: the sheets of a table, the same for every format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from attnbench.report import names
from attnbench.report.collect import Experiment, Scalar
from attnbench.report.compare import Comparison, Reported
from attnbench.report.rank import Ranks, shown
from attnbench.report.rows import Row

Mark = Literal["", "best", "tied", "paper"]
ABSENT = ""
DENSE = "inf"
"""The column of the dense model, where columns are budgets."""


@dataclass(frozen=True)
class Entry:
    """One field. mark: best (bold), tied (underlined), paper (a number of the paper, in italics)."""

    text: str = ABSENT
    mark: Mark = ""


@dataclass(frozen=True)
class Column:
    """title: a line break in it is for narrow places. shed: the order in which columns give way; 0 never does."""

    title: str
    left: bool = False
    shed: int = 0


@dataclass(frozen=True)
class Sheet:
    """One table; every line has an entry for each column."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[tuple[Entry, ...], ...]


@dataclass(frozen=True)
class View:
    """The table section of a spec, with what it leaves out filled in."""

    rows: str
    cols: str | None
    values: tuple[str, ...]
    reduce: str
    extra: tuple[str, ...]
    omit: tuple[str, ...] = ()
    mean: bool = False

    @classmethod
    def of(cls, table: Mapping[str, object]) -> View:
        return cls(
            rows=str(table.get("rows") or "label"),
            cols=str(table["cols"]) if table.get("cols") else None,
            values=_strings(table.get("value")),
            reduce=str(table.get("reduce") or "mean_std"),
            extra=_strings(table.get("extra")),
            omit=_strings(table.get("omit")),
            mean=bool(table.get("mean")),
        )


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value) if isinstance(value, (list, tuple)) else ()


@dataclass(frozen=True)
class Line:
    """One line of a pivot: rows that differ only on the axis of the columns."""

    title: str
    rows: Mapping[str, Row]


def pivot(rows: Sequence[Row], view: View) -> list[Line]:
    """Lines of a pivot, in grid order; empty where the rows lie on one line, which reads better from top to bottom."""
    if view.cols is None:
        return []
    found: dict[tuple[tuple[str, str], ...], dict[str, Row]] = {}
    for row in rows:
        path, value = row.coordinate(view.cols)
        rest = tuple((name, repr(item)) for name, item in row.axes.items() if name != path)
        found.setdefault(rest, {})[column_title(value)] = row
    if len(found) < 2:
        return []
    titles = titles_of([list(line.values()) for line in found.values()], view.rows, without=view.cols)
    return [Line(title, line) for title, line in zip(titles, found.values(), strict=True)]


def column_title(value: Scalar) -> str:
    """Of a value of the axis of columns; None: of cells that it does not tell apart."""
    return "all" if value is None else str(value)


def titles_of(groups: Sequence[Sequence[Row]], name: str, without: str | None = None) -> list[str]:
    """A title for each group of rows: its value on the axis `name`, or on all axes where that is too little.

    without: the axis on which the rows of a group differ.
    """
    short, long = [], []
    for rows in groups:
        path, value = rows[0].coordinate(name)
        own = [str(value)] if value is not None and all(row.coordinate(name)[1] == value for row in rows) else []
        hidden = rows[0].coordinate(without)[0] if without else None
        rest = [str(item) for key, item in rows[0].axes.items() if key not in (hidden, path) and str(item) not in own]
        whole = ", ".join([*own, *dict.fromkeys(rest)]) if without else rows[0].label
        long.append(whole or rows[0].label)
        short.append(own[0] if own else long[-1])
    return short if len(set(short)) == len(short) else long


def contests(rows: Sequence[Row], view: View) -> Iterator[tuple[str, list[Row]]]:
    """Which rows are compared with one another: those of a column that are scored on the same corpus and alike."""
    lines = pivot(rows, view)
    columns = [
        [line.rows[column] for line in lines if column in line.rows]
        for column in dict.fromkeys(title for line in lines for title in line.rows)
    ]
    for metric in view.values:
        for column in columns or [list(rows)]:
            for corpus in dict.fromkeys(row.corpus for row in column):
                for alike in _alike([row for row in column if row.corpus == corpus], metric):
                    yield metric, alike


def _alike(rows: Sequence[Row], metric: str) -> Iterator[list[Row]]:
    """The rows by how they were scored; those that do not say it are as the others where there is one way, and take no
    part where there are several."""
    for basis in dict.fromkeys(row.basis(metric) for row in rows):
        yield from _scored_alike([row for row in rows if row.basis(metric) == basis], metric)


def _scored_alike(rows: Sequence[Row], metric: str) -> list[list[Row]]:
    ways = dict.fromkeys(found for row in rows if (found := row.signatures(metric)))
    if len(ways) < 2:
        return [list(rows)]
    return [[row for row in rows if row.signatures(metric) == way] for way in ways]


def sheets(experiment: Experiment, rows: Sequence[Row], view: View, ranks: Ranks, compared: Comparison) -> list[Sheet]:
    """The sheets of a table: one list, or a pivot for every value and a list of everything else."""
    lines = pivot(rows, view)
    if not lines:
        return [_list(experiment.title, rows, view, view.values, ranks, compared)]
    grids = [
        _grid(f"{experiment.title}: {names.title(metric)}", metric, lines, view, ranks, compared)
        for metric in view.values
    ]
    rest = _list(f"{experiment.title}: attention and speed", rows, view, (), ranks, compared)
    return [*grids, rest] if len(rest.columns) > 1 else grids


def value_entry(row: Row, metric: str, view: View, ranks: Ranks) -> Entry:
    """`mean ± std (n)`; of a row with cells that are not done `(n of m)`; of a row with none, how far it has come."""
    stat, value = row.stats.get(metric), shown(row, metric, view.reduce)
    if stat is None or value is None:
        return Entry(row.status if not row.done else ABSENT if any(cell.scored for cell in row.done) else "diverged")
    text = names.number(metric, value)
    if view.reduce == "mean_std" and stat.std is not None:
        text += f" ± {names.number(metric, stat.std)}"
    count = f"{stat.n}" if stat.n == len(row.cells) else f"{stat.n} of {len(row.cells)}"
    rank = ranks.get((row.label, metric))
    mark: Mark = rank.kind if rank is not None and rank.kind != "worse" else ""
    return Entry(f"{text} ({count})", mark)


def _paper(number: Reported | None) -> Entry:
    return Entry(number.text, "paper") if number else Entry()


def _grid(title: str, metric: str, lines: Sequence[Line], view: View, ranks: Ranks, compared: Comparison) -> Sheet:
    columns = list(dict.fromkeys(column for line in lines for column in line.rows))
    body = []
    for line in lines:
        cells = [line.rows.get(column) for column in columns]
        values = [value_entry(row, metric, view, ranks) if row else Entry() for row in cells]
        paper = [compared.beside(row, metric, view.values) if row else None for row in cells]
        if view.mean:
            values.append(_mean(line, [column for column in columns if column != DENSE], metric, view))
            paper.append(compared.average(next(iter(line.rows.values())), metric, view.values))
        body.append((Entry(line.title), *values))
        if any(paper):
            body.append((Entry(f"{line.title}, paper", "paper"), *map(_paper, paper)))
    heads = [f"{view.rows} / {view.cols}", *columns, *(["mean"] if view.mean else [])]
    return Sheet(title, tuple(Column(head, left=not place) for place, head in enumerate(heads)), tuple(body))


def _mean(line: Line, columns: Sequence[str], metric: str, view: View) -> Entry:
    """Over these columns; empty where one of them is."""
    each = [shown(line.rows[column], metric, view.reduce) if column in line.rows else None for column in columns]
    numbers = [value for value in each if value is not None]
    return Entry(names.number(metric, fmean(numbers))) if numbers and len(numbers) == len(each) else Entry()


@dataclass(frozen=True)
class _Part:
    column: Column
    entries: list[Entry]


def _list(
    title: str, rows: Sequence[Row], view: View, values: Sequence[str], ranks: Ranks, compared: Comparison
) -> Sheet:
    axis = view.cols if view.cols and len(rows) > 1 and values else view.rows
    heading = axis if values else "row"
    titles = titles_of([[row] for row in rows], axis) if values else [row.label for row in rows]
    parts = [_Part(Column(heading, left=True), [Entry(text) for text in titles])]
    for metric in values:
        parts.append(_Part(Column(names.title(metric)), [value_entry(row, metric, view, ranks) for row in rows]))
        beside = [compared.beside(row, metric, view.values) for row in rows]
        if any(beside):
            heading = "paper" if len(values) == 1 else f"paper\n{names.title(metric)}"
            parts.append(_Part(Column(heading), [_paper(number) for number in beside]))
    parts += _sites(rows, view, "attended", 4) + _sites(rows, view, "entropy", 1)
    for metric in dict.fromkeys(("train/tokens_per_s", "decode/tokens_per_s", *view.extra)):
        if metric in (*values, *view.omit) or metric.split("/", 1)[0] in ("attended", "entropy"):
            continue
        entries = [_plain(row, metric, view) for row in rows]
        if any(entry.text for entry in entries) or metric in view.extra:
            parts.append(_Part(Column(_broken(metric), shed=0 if metric in view.extra else 3), entries))
        theirs = [compared.beside(row, metric, view.values) for row in rows]
        if any(theirs):
            parts.append(_Part(Column(f"paper {_broken(metric)}", shed=2), [_paper(number) for number in theirs]))
    lines = tuple(zip(*(part.entries for part in parts), strict=True))
    return Sheet(title, tuple(part.column for part in parts), lines)


def _broken(metric: str) -> str:
    return names.title(metric).replace(" ", "\n", 1)


def _plain(row: Row, metric: str, view: View) -> Entry:
    value = shown(row, metric, view.reduce)
    return Entry(names.number(metric, value) if value is not None else ABSENT)


def _sites(rows: Sequence[Row], view: View, group: str, shed: int) -> list[_Part]:
    """One column for all sites of attention: `8.0/5.1/7.9`. Extra columns of the spec never give way."""
    if any(name.startswith(f"{group}/") for name in view.extra):
        shed = 0
    known = {name for row in rows for name in row.stats if group not in view.omit}
    sites = [site for site in names.SITES if f"{group}/{site}" in known]
    if not sites:
        return []
    column = Column(f"{group}\n{'/'.join(names.SITES[site] for site in sites)}", shed=shed)
    entries = []
    for row in rows:
        stats = [row.stats.get(f"{group}/{site}") for site in sites]
        texts = [
            names.number(f"{group}/{site}", stat.mean) if stat else "-" for site, stat in zip(sites, stats, strict=True)
        ]
        entries.append(Entry("/".join(texts) if any(stats) else ABSENT))
    return [_Part(column, entries)]
