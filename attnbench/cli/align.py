"""`attnbench align`: which word of a translation comes from which word of its source."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli import common


class Tool(StrEnum):
    ibm2 = "ibm2"
    eflomal = "eflomal"


def align(
    source: Annotated[Path, typer.Argument(help="Tokenised text, a sentence a line, words between spaces.")],
    target: Annotated[Path, typer.Argument(help="Its translation, line by line.")],
    method: Annotated[
        str, typer.Option("--method", help="forward, reverse, intersection, union, or grow-diag[-final[-and]].")
    ] = "grow-diag-final-and",
    train: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--train", metavar="SOURCE TARGET", help="Two files to learn from, instead of the text itself."),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case.")] = False,
    tool: Annotated[Tool, typer.Option("--aligner", help="The one built in, or eflomal if installed.")] = Tool.ibm2,
    save: Annotated[Path | None, typer.Option("--save", help="Keep what was learned in this file.")] = None,
    load: Annotated[Path | None, typer.Option("--load", help="Learn nothing: use what --save kept.")] = None,
    gold: common.Gold = None,
    gold_first: common.GoldFirst = 0,
    out: Annotated[Path | None, typer.Option("--out", help="File for the links, instead of stdout.")] = None,
    as_json: common.Json = False,
) -> None:
    """Link the words of two texts: for each pair of lines, `source-target` word numbers from 0. With --gold, print the
    alignment error rate instead, and write the links to --out alone.

    Example: attnbench align train.de train.en --lowercase --save de-en.npz --out train.align

    Example: attnbench align test.de test.en --load de-en.npz --gold test.gold
    """
    from attnbench.core.errors import SpecError
    from attnbench.core.files import require_writable
    from attnbench.data.alignment.links import format_links, read_gold, write_links
    from attnbench.data.alignment.tools import align_text, method_of, read_sides

    text, chosen = read_sides(source, target), method_of(method)
    if gold is None and gold_first:
        raise SpecError("--gold-first counts the words of gold links; name them with --gold FILE")
    taken = {
        "the source text": source,
        "its translation": target,
        "the file of --gold": gold,
        "the file of --load": load,
    }
    if train is not None:
        taken |= {"the source text of --train": train[0], "the translation of --train": train[1]}
    for option, file in (("--out", out), ("--save", save)):
        if file is not None:
            require_writable(file, option, folder=False)
            if name := next((name for name, other in taken.items() if other and _is_same(file, other)), None):
                raise SpecError(f"{option} {file}: this is {name}; name another file")
            taken[f"the file of {option}"] = file
    right = read_gold(gold, *text, first=gold_first) if gold else []  # first of all: a mistake there costs no training
    learned = read_sides(*train) if train else None
    found = align_text(text, chosen, tool=tool.value, train=learned, lowercase=lowercase, save=save, load=load)
    if out:
        write_links(out, found)
    score: dict[str, float | None] = {}
    if gold:
        from attnbench.metrics.alignment import alignment_error_rate

        score = alignment_error_rate(found, [each.sure for each in right], [each.possible for each in right])._asdict()
    lines = [] if out or (gold and not as_json) else [format_links(links) for links in found]
    if as_json:
        counts = {"pairs": len(found), "links": sum(map(len, found))}
        common.emit_json(counts | score | ({} if out else {"alignments": lines}))
        return
    common.show_scores(score)
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _is_same(file: Path, other: Path) -> bool:
    """Whether both name one file, of which only one content stays; a device keeps none."""
    if file.exists() and other.exists():
        return file.is_file() and file.samefile(other)
    return file.resolve() == other.resolve()
