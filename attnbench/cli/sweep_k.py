"""`attnbench sweep-k`: translation quality against the number of attended positions."""

from __future__ import annotations

from typing import Annotated

import typer

from attnbench.cli import common


def sweep_k(
    spec: common.SpecPath = None,
    k: Annotated[
        str | None,
        typer.Option("--k", help="Budgets with commas, like 1,4,inf. Left out: the spec's own, else 1,2,4,8,16,inf."),
    ] = None,
    seed: common.Seed = None,
    seeds: common.Seeds = None,
    jobs: common.Jobs = "1",
    overrides: common.Overrides = None,
    device: common.Device = None,
    dry_run: common.DryRun = False,
    fresh: common.Fresh = False,
    runs: common.Runs = common.RUNS,
    source: common.From = None,
    offline: common.Offline = False,
    as_json: common.Json = False,
) -> None:
    """Train and score the spec at every budget k, and print BLEU against k. Finished cells are kept.

    Example: attnbench sweep-k experiments/explicit_sparse/multi30k-de-en.yaml --k 1,4,8,inf --seeds 1,2,3 --jobs 2
    """
    from attnbench.experiment.axes import parse_budgets, require_budgets, with_budgets
    from attnbench.experiment.document import read_document
    from attnbench.experiment.grid import expand

    document = read_document(spec or common.packaged_spec("demo"), overrides or [])
    document = with_budgets(document, parse_budgets(k) if k is not None else None)
    experiment = expand(document, seeds=common.seeds_of(seed, seeds))
    require_budgets(experiment)
    common.conduct(
        experiment, common.settings(runs, jobs, device, fresh, source, offline), dry=dry_run, as_json=as_json
    )
