"""The `attnbench` command: registers every subcommand, and turns errors into one message and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import attnbench
from attnbench.cli import ablate, eval, list, prepare, report, schema, sweep_k, train
from attnbench.cli.common import set_up_logging
from attnbench.core.errors import AttnbenchError

app = typer.Typer(
    name="attnbench",
    help="The laboratory for attention in sequence-to-sequence learning: one YAML spec, one command, one table.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"attnbench {attnbench.__version__}")
        raise typer.Exit


@app.callback()
def options(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only on stderr.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Details on stderr.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colour, as with NO_COLOR.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Results go to stdout, progress to stderr.

    Exit codes: 0 ok, 1 a run failed, 2 bad usage or spec, 3 an optional package or hardware is missing,
    4 data cannot be had, 130 interrupted (what was reached is kept).
    """
    if no_color:
        os.environ["NO_COLOR"] = "1"
    set_up_logging(quiet=quiet, verbose=verbose)


app.command("prepare")(prepare.prepare)
app.command("train")(train.train)
app.command("eval")(eval.evaluate)
app.command("sweep-k")(sweep_k.sweep_k)
app.command("ablate")(ablate.ablate)
app.command("report")(report.report)
app.command("list")(list.list_)
app.command("schema")(schema.schema)


def main() -> None:
    """Entry point. An expected error is its message on stderr and its exit code, never a traceback."""
    try:
        app()
    except AttnbenchError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; run the same command again to go on\n")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; let Python end quietly
        sys.exit(1)


if __name__ == "__main__":
    main()
