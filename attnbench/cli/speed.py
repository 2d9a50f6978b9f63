"""`attnbench speed`: how fast mechanisms, training and decoding are here."""

from __future__ import annotations

import logging
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.cli import common

if TYPE_CHECKING:
    from attnbench.bench.results import Comparison
    from attnbench.bench.subjects import Subject


log = logging.getLogger("attnbench")


class What(StrEnum):
    ops = "ops"
    transforms = "transforms"
    attention = "attention"
    train = "train"
    decode = "decode"
    scaling = "scaling"


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


def speed(
    what: Annotated[
        What | None, typer.Argument(help="What to time; ops: transforms and attention. Left out: ops, train, decode.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer, smaller cases: two minutes instead of many.")] = False,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="Of Transformers: tiny, mini (two layers), iwslt, base; with commas. Left out: mini,iwslt (--quick: "
            "tiny) and models of every kind.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", help="Mechanisms beside softmax: topk, entmax15, window, one of your own; with commas."),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            "--spec",
            help="Time the cells of this YAML spec instead, on random words, in the precision of --precision: its "
            "models, updates of one batch, searches.",
        ),
    ] = None,
    overrides: common.Overrides = None,
    axis: common.Axis = None,
    precision: Annotated[Precision, typer.Option("--precision", help="Of models, and of attention.")] = Precision.fp32,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Left out: all that are here.", parser=common.number(1), metavar="N")
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Turns that every case has.", parser=common.number(1), metavar="N")
    ] = 5,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="Timed beside: entmax, torch (models of a spec, too), transformers, ctranslate2, adasplash; "
            "sdpa always is.",
        ),
    ] = None,
    compare: Annotated[Path | None, typer.Option("--compare", help="Say which ratios fell since this JSON.")] = None,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", help="Part that a ratio may fall by; left out: 0.1.", min=0, max=1)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for speed.json, .md and .svg; beside what is compared with, for now.json.",
            parser=common.place,
            metavar="DIR",
        ),
    ] = None,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Time transforms, attention, training and decoding against softmax, in turns, in one run; a transform or an
    attention that does not give what its definition gives stops it. With --compare it ends with 1 when a ratio fell, or
    a case is gone.

    Example: attnbench speed ops --against entmax

    Example: attnbench speed train --spec SPEC.yaml --axis 'transform=[softmax, {kind: topk, k: 8}, entmax15]'

    Example: attnbench speed --quick --compare speed.json
    """
    from attnbench.bench.results import compare as compared
    from attnbench.bench.run import Report, read_earlier, run
    from attnbench.core.errors import SpecError

    if tolerance is not None and compare is None:
        raise SpecError("--tolerance is of a comparison; name the earlier measurement with --compare FILE")
    cells = cells_of(spec, overrides or [], axis or [])
    for option, value in {"--size": size, "--only": only}.items() if cells else []:
        if value is not None:
            raise SpecError(f"{option}: with --spec its cells are timed, and nothing else; leave one of the two out")
    kept: list[Path] = []

    def keep(part: Report) -> None:
        try:
            kept.append(part.write_unfinished(out or Path()))
        except OSError as error:
            typer.echo(f"--out {out}: what is measured so far could not be kept: {error}", err=True)

    earlier, allowed = None if compare is None else read_earlier(compare), 0.1 if tolerance is None else tolerance
    command = shlex.join(["attnbench", *sys.argv[1:]])
    try:
        report = run(
            [what.value] if what else ["train", "decode"] if cells else ["ops", "train", "decode"], device=device,
            precision=precision.value, threads=threads, rounds=rounds, quick=quick, against=against, size=size,
            only=only, cells=cells, command=command, earlier=earlier, folder=out, keep=keep if out else None,
        )  # fmt: skip
    except BaseException as error:
        if kept:
            typer.echo(f"what was measured before is in {kept[-1]}", err=True)
        if isinstance(error, KeyboardInterrupt):  # nothing that goes on
            raise typer.Exit(common.exit_code(error)) from None
        raise
    # what was compared with stays, or many runs, each a little slower than the last, would never be told
    own = compare is not None and out is not None and compare.resolve() == (out / "speed.json").resolve()
    stem, worse = "now" if own else "speed", False
    left: BrokenPipeError | None = None
    unwritten: OSError | None = None
    try:  # what is measured is shown though a file may fail
        if as_json:
            common.emit_json(report.document)
        else:
            report.show(common.console())
    except BrokenPipeError as error:  # who reads may have left: it is written, and what fell is told
        left = error
    except SystemExit:  # so rich says the same
        left = BrokenPipeError()
    finally:
        try:
            if out is not None and not report.write(out, stem):
                typer.echo(f"no {stem}.svg: matplotlib is not installed (pip install 'attnbench[plot]')", err=True)
        except OSError as error:  # as where a disk is full: what fell is told all the same
            unwritten = error
    if own and unwritten is None:
        typer.echo(f"{compare} stays what later runs are compared with; this run is in {out}/{stem}.json", err=True)
    if earlier is not None:
        found = compared(earlier, report.document, allowed)
        _tell(found, allowed)
        worse = found.worse
    if unwritten is not None:
        raise unwritten
    if worse:
        raise typer.Exit(1)
    if left is not None:
        raise left


def cells_of(path: Path | None, overrides: list[str], axes: list[str]) -> list[Subject]:
    """The cells of a spec, each once, whatever its seeds, and those alike in all that is timed. Raises SpecError for a
    fault in it, and for options of a spec where there is none."""
    from attnbench.bench.subjects import Subject, Update
    from attnbench.core.errors import SpecError
    from attnbench.experiment.axes import with_axis
    from attnbench.experiment.document import read_document
    from attnbench.experiment.grid import expand

    if path is None:
        for option, given in (("--set", overrides), ("--axis", axes)):
            if given:
                raise SpecError(f"{option} {given[0]}: it changes a spec; name one with --spec")
        return []
    document = read_document(path, overrides)
    for option in axes:
        document = with_axis(document, option)
    found: dict[str, Subject] = {}
    for cell in expand(document).cells:
        train, sizes = cell.spec.train, cell.spec.task.model_sizes()
        longest = f", up to {sizes.longest_source} tokens" if sizes.longest_source is not None else ""
        found.setdefault(cell.label, Subject(
            f"{path.name}{longest}", cell.label, cell.spec.model.dump(), sizes,
            Update(train.batch_tokens, train.label_smoothing, train.clip, train.optimizer.dump()),
            cell.spec.search.dump(),
        ))  # fmt: skip
    once: dict[str, Subject] = {}
    for subject in found.values():
        first = once.setdefault(subject.digest(), subject)
        if first is not subject:
            log.warning("'%s' is timed as '%s': nothing that is timed differs", subject.name, first.name)
    return list(once.values())


def _tell(found: Comparison, allowed: float) -> None:
    """Say on stderr what fell and what is gone. Raises SpecError where nothing was compared."""
    from attnbench.bench.run import NOTHING_IN_COMMON
    from attnbench.core.errors import SpecError

    for fall in found.fallen:
        typer.echo(f"fell: {fall}", err=True)
    for section, group, name in found.gone:
        typer.echo(f"gone: {section}: {name} ({group}) was measured then", err=True)
    for each in found.notes:
        typer.echo(each, err=True)
    for fall in found.outrun:
        typer.echo(f"outrun, itself no slower: {fall}", err=True)
    if not found.compared:
        raise SpecError(NOTHING_IN_COMMON)
    other = f"; {found.other} of the earlier ones have no counterpart now" if found.other else ""
    fell = f"{len(found.fallen)} of {found.compared} ratios fell by more than {100 * allowed:.0f}%"
    typer.echo(f"{fell}{other}", err=True)
