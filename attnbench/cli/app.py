"""The `attnbench` command: registers every subcommand, and turns errors into one message and an exit code."""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated, ParamSpec

import typer

import attnbench
from attnbench.cli import ablate, align, copy_task, eval, list, prepare, report, schema, speed, sweep_k, train
from attnbench.cli.common import Ended, exit_code, set_up_logging
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

    Exit codes: 0 ok, 1 a run failed or `speed --compare` found one slower or gone, 2 bad usage or spec, 3 an optional
    package or hardware is missing, 4 data cannot be had, 130 interrupted, 143 ended by SIGTERM; what was reached is
    kept.
    """
    if no_color:
        os.environ["NO_COLOR"] = "1"
    set_up_logging(quiet=quiet, verbose=verbose)


P = ParamSpec("P")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """The command with one way out: an expected error is a message on stderr and an exit code, never a traceback."""

    @functools.wraps(command)
    def guard(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except AttnbenchError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as error:
            mend = "run the same command again to go on"
            if kwargs.get("fresh"):  # which would begin anew, and throw away what is done
                mend += ", without --fresh: cells that were not reached keep what stood there"
            typer.echo(f"interrupted; {mend}", err=True)
            raise typer.Exit(exit_code(error)) from None
        except BrokenPipeError:  # the reader left, as `| head` does; let Python end quietly
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (MemoryError, RuntimeError) as error:
            said = (str(error).strip() or "no more can be had").splitlines()[0]
            if not isinstance(error, MemoryError) and not re.search(
                r"allocate memory|out of memory|ALLOC_FAILED", said
            ):
                raise
            typer.echo(f"error: {said}; smaller batches take less, and so does a smaller beam", err=True)
            raise typer.Exit(1) from None
        except OSError as error:  # a disk that is full, a folder that may not be written
            place = f"{error.filename}: " if error.filename else ""
            refused = error.filename and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            mend = "; give yourself the rights to it, or name another place" if refused else ""
            typer.echo(f"error: {place}{error.strerror or error}{mend}", err=True)
            raise typer.Exit(1) from None

    return guard


for name, command in {
    "prepare": prepare.prepare,
    "train": train.train,
    "eval": eval.evaluate,
    "sweep-k": sweep_k.sweep_k,
    "ablate": ablate.ablate,
    "copy-task": copy_task.copy_task,
    "speed": speed.speed,
    "align": align.align,
    "report": report.report,
    "list": list.list_,
    "schema": schema.schema,
}.items():
    app.command(name)(guarded(command))


def main() -> None:
    """Entry point."""
    if sys.platform == "win32":
        sys.exit("error: attnbench runs on Linux and macOS; on Windows, install it in WSL")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, io.StringIO())
        elif isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="replace")  # a ? for a sign that the encoding has not, and no traceback
    try:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # and not one that who started this wants ignored
            signal.signal(signal.SIGTERM, _end)
        app(prog_name="attnbench")
    except KeyboardInterrupt as error:  # before a command began
        sys.exit(exit_code(error))


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


if __name__ == "__main__":
    main()
