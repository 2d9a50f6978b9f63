"""`attnbench speed`: how fast mechanisms, training and decoding are here."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli import common


class What(StrEnum):
    ops = "ops"
    train = "train"
    decode = "decode"
    scaling = "scaling"


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


def speed(
    what: Annotated[What | None, typer.Argument(help="What to time; left out: ops, train and decode.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases: a minute instead of many.")] = False,
    size: Annotated[str | None, typer.Option("--size", help="Of models: tiny, mini, iwslt, base; with commas.")] = None,
    precision: Annotated[Precision, typer.Option("--precision", help="Of models, and of attention.")] = Precision.fp32,
    threads: Annotated[int | None, typer.Option("--threads", help="Left out: all that are here.", min=1)] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Turns that every case has.", min=1)] = 5,
    against: Annotated[
        str | None, typer.Option("--against", help="Packages timed beside: entmax, torch, ctranslate2, adasplash.")
    ] = None,
    compare: Annotated[Path | None, typer.Option("--compare", help="Say which ratios fell since this JSON.")] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Part that a ratio may fall by.", min=0, max=1)] = 0.1,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for speed.json, speed.md and speed.svg.")] = None,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Time transforms, attention, training and decoding against softmax, in turns, in one run; a transform or an
    attention that does not give what its definition gives stops it. With --compare it ends with 1 when a ratio fell.

    Example: attnbench speed ops --against entmax

    Example: attnbench speed --quick --compare speed.json
    """
    from attnbench.bench.run import Report, read_earlier, run

    kept: list[Path] = []

    def keep(part: Report) -> None:
        try:
            kept.append(part.write_unfinished(out or Path()))
        except OSError as error:
            typer.echo(f"--out {out}: what is measured so far could not be kept: {error}", err=True)

    earlier = None if compare is None else read_earlier(compare)
    command = " ".join(["attnbench", *sys.argv[1:]])
    try:
        report = run(
            [what.value] if what else ["ops", "train", "decode"], device=device, precision=precision.value,
            threads=threads, rounds=rounds, quick=quick, against=against, size=size, command=command,
            earlier=earlier, folder=out, keep=keep if out else None,
        )  # fmt: skip
    except BaseException as error:
        if kept:
            typer.echo(f"what was measured before is in {kept[-1]}", err=True)
        if isinstance(error, KeyboardInterrupt):  # nothing that goes on
            raise typer.Exit(130) from None
        raise
    try:  # what is measured is shown though a file may fail, and written though who reads may have left
        if as_json:
            common.emit_json(report.document)
        else:
            report.show(common.console())
    finally:
        if out is not None and not report.write(out):
            typer.echo("no speed.svg: matplotlib is not installed (pip install 'attnbench[plot]')", err=True)
    if earlier is not None:
        fallen, compared = report.falls(earlier, tolerance)
        for fall in fallen:
            typer.echo(f"fell: {fall}", err=True)
        typer.echo(f"{len(fallen)} of {compared} ratios fell by more than {100 * tolerance:.0f}%", err=True)
        if fallen:
            raise typer.Exit(1)
