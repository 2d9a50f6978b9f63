"""`attnbench eval`: score or translate with the weights of a cell."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.cli import common

if TYPE_CHECKING:
    from attnbench.data.alignment.links import Gold
    from attnbench.data.alignment.tools import Sides
    from attnbench.experiment.evaluation import Trained
    from attnbench.tasks.base import Metrics


def evaluate(
    cell: Annotated[Path, typer.Argument(metavar="CELL", help="Folder of a cell: runs/<name>/cells/<cell>.")],
    split: Annotated[str | None, typer.Option("--split", help="Split to score; left out: test.")] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", help="One checkpoint, instead of what was evaluated.", parser=common.number(0), metavar="N"
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option("--input", help="Translate this text file instead; - is stdin.")] = None,
    references: Annotated[
        list[Path] | None,
        typer.Option("--reference", help="Score what --input gives against this text; again for each further one."),
    ] = None,
    align: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--align", metavar="SOURCE TARGET", help="Link two tokenised texts by its attention instead."),
    ] = None,
    gold: common.Gold = None,
    gold_first: common.GoldFirst = 0,
    overrides: common.Overrides = None,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Decode a split with a trained cell and score it, translate a text, or judge its attention as word alignment.
    Nothing in the run folder changes.

    Example: attnbench eval runs/demo/cells/budget-inf-s1-* --split valid --set search.size=10

    Example: echo "ein Hund läuft" | attnbench eval CELL --input -

    Example: attnbench eval CELL --input new.de --reference new.en

    Example: attnbench eval CELL --align test.de test.en --gold test.gold
    """
    from attnbench.core.errors import DataError, SpecError
    from attnbench.core.spec import unknown
    from attnbench.data.alignment.links import read_gold
    from attnbench.data.alignment.tools import Sides, read_sides
    from attnbench.data.datasets.base import SPLITS
    from attnbench.experiment.evaluation import load_trained, score_split, score_translations, translate

    if gold is not None and align is None:
        raise SpecError("--gold: links of which text? Name it with --align SOURCE TARGET")
    if gold is None and gold_first:
        raise SpecError("--gold-first counts the words of gold links; name them with --gold FILE")
    if references and text is None:
        raise SpecError("--reference: of which text? Name its source with --input FILE")
    given = [name for name, value in (("--align", align), ("--input", text), ("--split", split)) if value is not None]
    if len(given) > 1:
        raise SpecError(f"{' and '.join(given)} exclude each other: each names a text of its own")
    searched = [each for each in overrides or [] if each.strip().startswith("search")]
    if align is not None and searched:
        raise SpecError(f"--set {searched[0]}: changes nothing, --align searches for no output; leave it out")
    split = split or "test"
    if split not in SPLITS:
        raise SpecError(f"--split: {unknown('split', split, SPLITS)}")
    lines = common.read_lines(text) if text is not None else []
    wanted = [common.read_lines(each) for each in references or []]
    for path, each in zip(references or [], wanted, strict=True):
        if not lines:
            raise DataError(f"{text} is empty: there is nothing to score")
        if len(each) != len(lines):
            raise DataError(f"{path} has {len(each)} lines, and {text} has {len(lines)}; give one for each")
    sides = read_sides(*align) if align is not None else Sides([], [])
    right = read_gold(gold, *sides, first=gold_first) if gold is not None else None
    trained = load_trained(cell, overrides or [], common.cache(), device=device, step=step)
    if text is not None:
        lines = translate(trained, lines)
        metrics = score_translations(trained, lines, wanted) if wanted else None
        if as_json:
            scores = {} if metrics is None else {"metrics": metrics.values, "signatures": metrics.signatures}
            common.emit_json({"steps": trained.steps, **scores, "translations": lines})
        elif metrics is not None:
            _show(metrics)
        else:
            sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    if align is not None:
        _judge(trained, sides, right, as_json=as_json)
        return
    metrics = score_split(trained, split)
    if as_json:
        common.emit_json(
            {"split": split, "steps": trained.steps, "metrics": metrics.values, "signatures": metrics.signatures}
        )
        return
    _show(metrics, f"{split}/")


def _show(metrics: Metrics, prefix: str = "") -> None:
    out = common.console()
    for name, value in metrics.values.items():
        signature = metrics.signatures.get(name, "")
        out.print(f"{prefix}{name} {value:.4f} {signature}".rstrip(), markup=False)


def _judge(trained: Trained, sides: Sides, gold: Sequence[Gold] | None, *, as_json: bool) -> None:
    """Links by attention; with gold ones, the error rates of links and of weights instead."""
    from attnbench.data.alignment.links import format_links
    from attnbench.metrics.alignment import alignment_error_rate, attention_links, soft_alignment_error_rate
    from attnbench.tasks.attention import word_attention

    weights = word_attention(trained.model, trained.data, *sides)
    links = [attention_links(table) for table in weights]
    if gold is None:
        lines = [format_links(each) for each in links]
        if as_json:
            common.emit_json({"steps": trained.steps, "alignments": lines})
        else:
            sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    sure, possible = [each.sure for each in gold], [each.possible for each in gold]
    soft = soft_alignment_error_rate(weights, sure, possible)
    scores = {**alignment_error_rate(links, sure, possible)._asdict(), "saer": soft.aer}
    if as_json:
        common.emit_json({"steps": trained.steps, "pairs": len(links), **scores})
        return
    common.show_scores(scores)
