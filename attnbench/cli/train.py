"""`attnbench train`: one cell."""

from __future__ import annotations

from typing import Annotated

import typer

from attnbench.cli import common


def train(
    spec: common.SpecPath = None,
    cell: Annotated[
        str | None, typer.Option("--cell", help="Label of the cell to train, where there are more.")
    ] = None,
    seed: common.Seed = None,
    overrides: common.Overrides = None,
    device: common.Device = None,
    dry_run: common.DryRun = False,
    fresh: common.Fresh = False,
    runs: common.Runs = common.RUNS,
    source: common.From = None,
    offline: common.Offline = False,
    as_json: common.Json = False,
) -> None:
    """Train one cell, going on from its newest checkpoint, then evaluate it.

    Example: attnbench train experiments/explicit_sparse/multi30k-de-en.yaml --cell budget-8 --seed 1
    """
    from attnbench.experiment.document import read_document
    from attnbench.experiment.grid import expand, only

    experiment = expand(
        read_document(spec or common.packaged_spec("demo"), overrides or []), seeds=common.seeds_of(seed, None)
    )
    experiment = only(experiment, cell)
    common.conduct(experiment, common.settings(runs, "1", device, fresh, source, offline), dry=dry_run, as_json=as_json)
