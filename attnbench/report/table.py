"""Tables of a run folder: `render` one format, `write_results` all of them, `render_terminal` for people.

Always made from the cells' files, and only from them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console

from attnbench.core.errors import SpecError
from attnbench.core.files import write_atomic
from attnbench.core.spec import unknown
from attnbench.report import formats
from attnbench.report.collect import Experiment, collect
from attnbench.report.compare import Comparison, comparison
from attnbench.report.layout import View, contests, sheets
from attnbench.report.notes import notes
from attnbench.report.rank import Judge, Ranks, rank
from attnbench.report.results import csv_text, document
from attnbench.report.rows import Row, group
from attnbench.report.significance import PairedTests

Format = Literal["json", "csv", "md", "tex"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True)
class Report:
    """Everything that the tables of one experiment show."""

    experiment: Experiment
    rows: Sequence[Row]
    view: View
    ranks: Ranks
    compared: Comparison

    def results(self) -> dict[str, object]:
        """The content of results.json."""
        return document(self.experiment, self.rows, self.view, self.ranks, self.compared)

    def text(self, format: str) -> str:
        """Raises SpecError for a format that there is not."""
        if format == "json":
            return json.dumps(self.results(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        if format == "csv":
            return csv_text(self.rows, self.view, self.compared)
        if format == "md":
            return formats.markdown(self.laid_out())
        if format == "tex":
            return formats.tex(self.laid_out())
        raise SpecError(unknown("format", format, FORMATS))

    def laid_out(self) -> formats.Document:
        about = (self.experiment, self.rows, self.view, self.ranks, self.compared)
        return formats.Document(self.experiment.name, tuple(sheets(*about)), tuple(notes(*about)))


def report(folder: Path, judge: Judge | None = None) -> Report:
    """Read a run folder.

    judge: the paired test behind underlined values; without one, the bootstrap on saved hypotheses.
    Raises DataError where `folder` is no run folder, AttnbenchError where its cells must not share a table.
    """
    experiment = collect(folder)
    rows = group(experiment.cells)
    view = View.of(experiment.table)
    ranks = rank(contests(rows, view), view.reduce, judge or PairedTests(folder))
    return Report(experiment, rows, view, ranks, comparison(experiment))


def render(folder: Path, format: str) -> str:
    """The table of a run folder as `md`, `csv`, `tex` or `json`. Raises as `report`; SpecError for another format."""
    return report(folder).text(format)


def render_terminal(folder: Path, console: Console) -> None:
    """Print the table of a run folder. Raises as `report`."""
    formats.terminal(report(folder).laid_out(), console)


def write_results(folder: Path) -> list[Path]:
    """Make results.{json,csv,md,tex} of a run folder again, each whole or untouched. Raises as `report`."""
    tests = PairedTests(folder)
    made = report(folder, tests)
    texts = {folder / f"results.{format}": made.text(format) for format in FORMATS}
    for path, text in texts.items():
        write_atomic(path, text)
    tests.save()
    return list(texts)
