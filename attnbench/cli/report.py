"""`attnbench report`: the table of a run folder, made again from its cells."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli import common


class Format(StrEnum):
    md = "md"
    csv = "csv"
    tex = "tex"
    json = "json"


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder: it holds grid.json and cells/.")],
    format: Annotated[Format | None, typer.Option("--format", help="Print this instead of a table.")] = None,
    as_json: common.Json = False,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            help="Copy the run folder, checkpoints aside, to a folder of its name in this one.",
            parser=common.place,
            metavar="DIR",
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="LABEL LABEL", help="Print how two rows differ, with p of the paired tests."),
    ] = None,
    examples: Annotated[
        tuple[str, str] | None,
        typer.Option("--examples", metavar="LABEL LABEL", help="Print where two rows differ the most, in Markdown."),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="What examples differ in: rep (left out: this) or drop.")
    ] = None,
    most: Annotated[
        int | None, typer.Option("--most", parser=common.number(1), metavar="N", help="Examples each way; left out: 5.")
    ] = None,
) -> None:
    """Make results.json, .csv, .md and .tex of a run folder again from its cells, and print the table.

    Example: attnbench report runs/demo --format md

    Example: attnbench report runs/demo --save experiments/smoke/results

    Example: attnbench report runs/demo --compare budget-2 budget-inf

    Example: attnbench report runs/constrained/kftt-ja-en --examples softmax "csparsemax (c=0.2)"
    """
    from attnbench.core.errors import SpecError
    from attnbench.core.files import require_writable
    from attnbench.report import table
    from attnbench.report.examples import examples_page
    from attnbench.report.formats import terminal
    from attnbench.report.pair import compare_rows
    from attnbench.report.save import save as copy

    if as_json and format not in (None, Format.json):
        raise SpecError(f"--json and --format {format} exclude each other; give one of them")
    if compare is not None:
        if any(each is not None for each in (examples, by, most, format, save)):
            raise SpecError("--compare prints a table of its own; drop --examples, --by, --most, --format and --save")
        pair = compare_rows(folder, *compare)
        if as_json:
            common.emit_json(pair.dump())
        else:
            terminal(pair.laid_out(), common.console())
        return
    if examples is not None:
        if as_json or format is not None or save is not None:
            raise SpecError("--examples prints a page of its own; drop --json, --format and --save")
        sys.stdout.write(examples_page(folder, *examples, by=by or "rep", most=most or 5))
        return
    if by is not None or most is not None:
        raise SpecError("--by and --most choose examples; name two rows with --examples")
    if save is not None:
        require_writable(save, "--save", folder=True)
    log = logging.getLogger("attnbench")
    try:
        table.write_results(folder)
    except OSError as error:  # a folder that is only to be read still has a table
        log.warning("%s: results.* could not be written there (%s)", folder, error.strerror or error)
    saved = copy(folder, save) if save is not None else None  # first: whoever reads the table may leave early
    if as_json or format is Format.json:
        common.emit_json(table.report(folder).results())
    elif format is not None:
        sys.stdout.write(table.render(folder, format.value))
    else:
        table.render_terminal(folder, common.console())
    if saved is not None:
        log.info("saved to %s", saved)
