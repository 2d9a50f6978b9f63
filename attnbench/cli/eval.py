"""`attnbench eval`: score or translate with the weights of a cell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli import common


def evaluate(
    cell: Annotated[Path, typer.Argument(metavar="CELL", help="Folder of a cell: runs/<name>/cells/<cell>.")],
    split: Annotated[str, typer.Option("--split", help="Split to score.")] = "test",
    step: Annotated[int | None, typer.Option("--step", help="One checkpoint, instead of what was evaluated.")] = None,
    text: Annotated[Path | None, typer.Option("--input", help="Translate this text file instead; - is stdin.")] = None,
    overrides: common.Overrides = None,
    device: common.Device = None,
    as_json: common.Json = False,
) -> None:
    """Decode a split with a trained cell and score it, or translate a text. Nothing in the run folder changes.

    Example: attnbench eval runs/demo/cells/budget-inf-s1-082c611b --split valid --set search.size=10

    Example: echo "ein Hund läuft" | attnbench eval CELL --input -
    """
    from attnbench.data.prepare import cache_root
    from attnbench.experiment.evaluation import load_trained, score_split, translate

    trained = load_trained(cell, overrides or [], cache_root(), device=device, step=step)
    if text is not None:
        lines = translate(trained, common.read_lines(text))
        if as_json:
            common.emit_json({"steps": trained.steps, "translations": lines})
        else:
            sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    metrics = score_split(trained, split)
    if as_json:
        common.emit_json(
            {"split": split, "steps": trained.steps, "metrics": metrics.values, "signatures": metrics.signatures}
        )
        return
    out = common.console()
    for name, value in metrics.values.items():
        signature = metrics.signatures.get(name, "")
        out.print(f"{split}/{name} {value:.4f} {signature}".rstrip(), markup=False)
