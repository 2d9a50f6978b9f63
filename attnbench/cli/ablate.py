"""`attnbench ablate`: the grid of a spec, or axes named on the command line."""

from __future__ import annotations

from attnbench.cli import common


def ablate(
    spec: common.SpecPath = None,
    axis: common.Axis = None,
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
    """Train and score every cell of the spec's grid, with the axes given here added to it or in their place.

    Example: attnbench ablate SPEC.yaml --axis 'transform=[softmax, {kind: topk, k: 8}, entmax15]' --seeds 1,2,3
    """
    from attnbench.experiment.axes import with_axis
    from attnbench.experiment.document import read_document
    from attnbench.experiment.grid import expand

    document = read_document(spec or common.packaged_spec("demo"), overrides or [])
    for option in axis or []:
        document = with_axis(document, option)
    experiment = expand(document, seeds=common.seeds_of(seed, seeds))
    common.conduct(
        experiment, common.settings(runs, jobs, device, fresh, source, offline), dry=dry_run, as_json=as_json
    )
