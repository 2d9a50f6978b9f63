"""`attnbench copy-task`: models of every family learn to copy, and are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli import common


def copy_task(
    spec: Annotated[
        Path | None, typer.Argument(help="YAML spec; left out: the packaged copy.yaml.", show_default=False)
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
    """Train the spec's models to copy sequences, and print BLEU, exact match, seconds per epoch and epochs to the best.
    Curves per epoch are in the metrics.jsonl of each cell.

    Example: attnbench copy-task experiments/copy_seq2seq/lm1b.yaml --from DIR --seeds 1,2,3 --jobs 2
    """
    from attnbench.core.errors import SpecError
    from attnbench.experiment.document import read_document
    from attnbench.experiment.grid import expand

    document = read_document(spec or common.packaged_spec("copy"), overrides or [])
    experiment = expand(document, seeds=common.seeds_of(seed, seeds))
    for cell in experiment.cells:
        if cell.spec.task.kind != "copying":
            raise SpecError(
                f"{document.at('task')}: '{cell.label}' is of the task '{cell.spec.task.kind}', and copy-task compares "
                "models that copy; write `task: {kind: copying, dataset: ...}`, or use `attnbench ablate`"
            )
    common.conduct(
        experiment, common.settings(runs, jobs, device, fresh, source, offline), dry=dry_run, as_json=as_json
    )
