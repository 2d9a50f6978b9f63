"""What every command shares: consoles, logging, the one way out for errors, options with one meaning."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from attnbench.experiment.grid import Experiment
    from attnbench.experiment.settings import Settings


_DIGITS = re.compile("[0-9]{1,4000}")
"""Python's own reading of numbers takes digits of every script, and 1_0, and no more than 4,300 of them."""


def place(word: str | Path) -> Path:
    """The path of an option that names a folder. An empty one, as of a variable of the shell that is not set, would be
    the working directory."""
    if not str(word):
        raise typer.BadParameter("this is empty; name a folder, . for this one")
    return Path(word)


def number(least: int, most: float = math.inf) -> Callable[[str | int], int]:
    """What reads a whole number of an option."""

    def read(word: str | int) -> int:
        text = str(word).strip()
        if not _DIGITS.fullmatch(text) or not least <= int(text) <= most:
            end = "on" if most == math.inf else f"to {most}"
            raise typer.BadParameter(f"{word} is no whole number from {least} {end}")
        return int(text)

    return read


SpecPath = Annotated[Path | None, typer.Argument(help="YAML spec; left out: the packaged demo.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="path=value laid over the spec; repeatable.")]
Axis = Annotated[
    list[str] | None,
    typer.Option(
        "--axis",
        help="name=value,value; transform, pattern, site, sparsify, budget, search or another part, cell, or a "
        "dotted path; labels of the spec's own entries are values, too.",
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="One seed instead of the spec's.", parser=number(0), metavar="N")
]
Seeds = Annotated[str | None, typer.Option("--seeds", help="Seeds with commas, instead of the spec's.")]
Jobs = Annotated[
    str,
    typer.Option(
        "--jobs",
        help="Cells at a time, each in a process of its own; auto: as many as make most progress here, measured in "
        "half a minute and kept.",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:N, mps; auto, or left out: a CUDA GPU if there is one.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would run; write nothing.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start every cell over, finished ones too.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of the run folders.", parser=place, metavar="DIR")]
From = Annotated[
    Path | None,
    typer.Option("--from", help="Folder with the corpus files; nothing is downloaded.", parser=place, metavar="DIR"),
]
Offline = Annotated[bool, typer.Option("--offline", help="Make no request.")]
Gold = Annotated[Path | None, typer.Option("--gold", help="Links to score against: s-t; possible: *s-t, spt.")]
GoldFirst = Annotated[
    int, typer.Option("--gold-first", help="Number of the first word there.", parser=number(0, 1), metavar="N")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


class Ended(KeyboardInterrupt):
    """SIGTERM, as batch systems send it: it leaves as much behind as Ctrl-C does."""


def exit_code(error: KeyboardInterrupt) -> int:
    """As shells count: 128 and the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(error, Ended) else signal.SIGINT)


RUNS = Path("runs")
_WIDEST = 1000
"""Columns of a table off a terminal, where none is cut."""


def console() -> Console:
    """stdout, for results. No colour off a terminal, nor with NO_COLOR, TERM=dumb or --no-color."""
    return _console(stderr=False)


def log_console() -> Console:
    """stderr, for progress."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal of another encoding shows ? for a sign that it has not
    narrow = stream.isatty() or "COLUMNS" in os.environ
    return Console(
        stderr=stderr, no_color=plain, highlight=False, soft_wrap=not stream.isatty(), width=None if narrow else _WIDEST
    )


def show_scores(scores: Mapping[str, float | None]) -> None:
    """One a line; `-` where there is none."""
    for name, value in scores.items():
        console().print(f"{name} {'-' if value is None else f'{value:.4f}'}", markup=False)


def emit_json(value: Any) -> None:
    """The one JSON document of a --json run."""
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=plain) + "\n")


def set_up_logging(*, quiet: bool, verbose: bool) -> None:
    """Plain lines on stderr: warnings always, progress unless --quiet, details with --verbose."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("attnbench")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)


def settings(
    runs: Path, jobs: str = "1", device: str | None = None, fresh: bool = False, source: Path | None = None,
    offline: bool = False,
) -> Settings:  # fmt: skip
    """What the options of every command that runs cells say. Raises SpecError for one that cannot be."""
    from attnbench.core.errors import SpecError
    from attnbench.experiment.settings import Settings

    if runs.exists() and not runs.is_dir():
        raise SpecError(f"--runs {runs}: this is a file; name a folder, which is made if need be")
    bars = log_console() if sys.stderr.isatty() and logging.getLogger("attnbench").isEnabledFor(logging.INFO) else None
    return Settings(runs, cache(), _jobs(jobs), device, fresh, source, offline, bars)


def cache() -> Path:
    """Where data are prepared. Raises SpecError where a file is there."""
    from attnbench.core.errors import SpecError
    from attnbench.core.files import cache_root

    root = cache_root()
    if root.is_file():
        raise SpecError(f"{root}: this is a file; set ATTNBENCH_CACHE to a folder, which is made if need be")
    return root


def _jobs(word: str) -> int | None:
    """Raises SpecError for what is no number of jobs."""
    from attnbench.core.errors import SpecError

    if word == "auto":
        return None
    if not _DIGITS.fullmatch(word) or len(word) > 4 or not int(word):
        raise SpecError(f"--jobs {word}: write a whole number from 1 on, or auto")
    return int(word)


def seeds_of(seed: int | None, seeds: str | None) -> list[int]:
    """The seeds of --seed and --seeds; raises SpecError for what is no list of numbers."""
    from attnbench.core.errors import SpecError

    if seed is not None and seeds is not None:
        raise SpecError("--seed and --seeds exclude each other; give one of them")
    if seed is not None:
        return [seed]
    if seeds is None:
        return []
    words = [word.strip() for word in seeds.split(",")]
    if not all(map(_DIGITS.fullmatch, words)):
        raise SpecError(f"--seeds {seeds}: write whole numbers from 0 on with commas, like 1,2,3")
    chosen = [int(word) for word in words]
    if len(set(chosen)) != len(chosen):
        raise SpecError(f"--seeds {seeds}: a seed stands twice")
    return chosen


def packaged_spec(name: str) -> Path:
    """The path of a spec inside the package."""
    from attnbench.core.files import packaged_specs

    return packaged_specs() / f"{name}.yaml"


def conduct(experiment: Experiment, chosen: Settings, *, dry: bool, as_json: bool) -> None:
    """Run the grid and print its table, or with `dry` what would run. Exits with 1 when a cell failed."""
    from attnbench.core.files import require_writable
    from attnbench.core.run_files import TRACEBACK, cell_folder
    from attnbench.experiment.dry_run import dry_run
    from attnbench.experiment.session import run_grid
    from attnbench.experiment.settings import root_of
    from attnbench.experiment.unused import unused
    from attnbench.train.runtime import choose_device

    choose_device(chosen.device)  # a device that is not there is an error now, not the failure of every cell
    _check_names(experiment)
    for line in unused(experiment):
        logging.getLogger("attnbench").warning("%s", line)
    if dry:
        show_dry_run(dry_run(experiment, chosen), as_json=as_json)
        return
    root = root_of(experiment, chosen)
    require_writable(root, "--runs", folder=True)
    logger = logging.getLogger("attnbench")
    failures = 0
    command = shlex.join(["attnbench", *sys.argv[1:]])
    from attnbench.report.table import render_terminal, report, write_results

    for outcome in run_grid(experiment, chosen, command):
        if outcome.error is not None:
            failures += 1
            kept = cell_folder(root, outcome.cell.folder) / TRACEBACK
            more = f" (traceback: {kept})" if kept.is_file() else ""
            logger.warning("[%s, seed %d] failed: %s%s", outcome.cell.label, outcome.cell.seed, outcome.error, more)
        try:
            write_results(root)  # after each cell, so that a long grid can be watched
        except Exception as error:  # a table that cannot be made is no reason to stop: it is told again at the end
            logger.warning("no table for now: %s", error)
    write_results(root)
    if as_json:
        emit_json(report(root).results())
    else:
        render_terminal(root, console())
    logger.info("results: %s", root)
    if failures:
        raise typer.Exit(1)


def _check_names(experiment: Experiment) -> None:
    """Warn of metrics that the table seems to misspell before hours go into it; a task may have others of its own."""
    from attnbench.report.names import misspelt

    values = experiment.table.value
    for key, named in (("value", [values] if isinstance(values, str) else values), ("extra", experiment.table.extra)):
        for metric in named:
            if near := misspelt(metric):
                where = experiment.document.at("table", key)
                logging.getLogger("attnbench").warning("%s: table.%s: '%s' is no metric that is known; did you mean "
                                                       "'%s'?", where, key, metric, near)  # fmt: skip


def show_dry_run(plan: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        emit_json(plan)
        return
    from rich.table import Table
    from rich.text import Text

    from attnbench.core.files import dump_yaml

    out = console()
    out.print(f"# the first cell of {plan['name']}, resolved", markup=False)
    out.print(dump_yaml(plan["spec"]), markup=False, end="")
    table = Table("cell", "seed", "digest", "parameters", "done", "data ready")
    for cell in plan["cells"]:
        table.add_row(
            Text(cell["label"]), str(cell["seed"]), cell["digest"][:8], f"{cell['parameters']:,}",
            "damaged" if cell["damaged"] else "elsewhere" if cell["taken_from"] else "yes" if cell["done"] else "no",
            "yes" if cell["data_ready"] else "no",
        )  # fmt: skip
    out.print(table)
    for cell in plan["cells"]:
        if cell["taken_from"]:
            out.print(f"{cell['label']}, seed {cell['seed']}: done in {cell['taken_from']}", markup=False)
    for line in _data_to_fetch(plan):
        out.print(line, markup=False, soft_wrap=True)
    count, runs = len(plan["cells"]), {cell["digest"] for cell in plan["cells"]}
    fewer = f", {len(runs)} runs: cells of one digest are one," if len(runs) < count else ""
    cells = "1 cell" if count == 1 else f"{count} cells"
    out.print(f"{cells}{fewer} would go to {plan['folder']}; nothing was written", markup=False)


def _data_to_fetch(plan: dict[str, Any]) -> list[str]:
    """What each corpus is that a run would fetch, and from where."""
    from attnbench.data.prepare import describe_datasets

    wanted = {cell["dataset"] for cell in plan["cells"] if not cell["data_ready"]}
    lines = []
    for each in describe_datasets():
        if each["name"] in wanted and each["sources"]:
            size = f", {each['bytes'] / 1e6:,.0f} MB" if each["bytes"] else ""
            lines.append(
                f"data to fetch: {each['title']}{size}, from {each['sources'][0]}; licence: {each['licence']}. "
                f"`attnbench prepare {each['name']} --from DIR` takes the files from a folder"
            )
    return lines


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, or of stdin for `-`. Raises DataError when it cannot be read."""
    from attnbench.core.errors import DataError
    from attnbench.data import lines

    if str(path) == "-" and sys.stdin is None:
        raise DataError("stdin is closed; name a file")
    found = lines.lines_of(sys.stdin.buffer, Path("stdin")) if str(path) == "-" else lines.read_lines(path)
    return [line.text for line in found]
