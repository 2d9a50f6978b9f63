"""What stands under a table: what its marks mean, and what every number in it carries."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnbench.core.run_files import WHOLE_CELL
from attnbench.core.spec import differing
from attnbench.report import names
from attnbench.report.collect import STATUSES, Cell, Experiment
from attnbench.report.compare import Comparison
from attnbench.report.layout import View, pivot
from attnbench.report.rank import LEVEL, Ranks
from attnbench.report.results import total_seconds
from attnbench.report.rows import Row, said
from attnbench.report.significance import FEWEST, SAMPLES, has_test

SHOWN = 20
_LOSSLESS = 99.5
"""BLEU that perfect outputs have where tokenisation can be undone but for some quotation marks."""
_NOTICED = 0.1
"""Part of a cell's time in which others used its cores, from which on a table says so."""
_CUT = 0.05
"""Part of a split's outputs that the search cut off, above which a table says so."""
_ATTENTION = "model.attention"
"""An axis below it may speak of several sites at once (`all`, `site`, `budget`)."""


def notes(experiment: Experiment, rows: Sequence[Row], view: View, ranks: Ranks, compared: Comparison) -> list[str]:
    """In this order: what is not done or diverged, what is shown, how it was scored, where the paper's come from."""
    done = [cell for row in rows for cell in row.done]
    return [
        *_unfinished(experiment.cells),
        *_outcomes(done),
        *_twins(done),
        *_settings(rows),
        *_precisions(done),
        *_code(done),
        *_unknown(rows, view),
        *_apart(rows, view),
        *_legend(rows, view, ranks),
        *_scores(rows, view),
        *_cut_off(done, view),
        *compared.notes,
        *_origin(done),
        *(_speeds(done) if _shows_speeds(view) else []),
    ]


def _unfinished(cells: Iterable[Cell]) -> list[str]:
    cells = list(cells)
    failed = [cell for cell in cells if cell.status == "failed"]
    lines = [f"failed: {cell.label}, seed {cell.seed}: {cell.reason}" for cell in failed[:SHOWN]]
    if len(failed) > SHOWN:
        lines.append(f"failed: {len(failed) - SHOWN} more")
    counts = Counter(cell.status for cell in cells)
    waiting = [
        f"{counts[status]} {status}" for status in STATUSES if status not in ("done", "failed") and counts[status]
    ]
    if waiting:
        lines.append(f"not done yet, of {len(cells)} cells: {', '.join(waiting)}")
    return lines


def _outcomes(done: Sequence[Cell]) -> list[str]:
    """How trainings ended that did not run to the end of their spec; a divergence for itself, with what was scored."""
    diverged = [cell for cell in done if cell.diverged]
    lines = [
        f"{cell.label}, seed {cell.seed}: {cell.outcome.get('text')}; {_scored(cell)}" for cell in diverged[:SHOWN]
    ]
    if len(diverged) > SHOWN:
        lines.append(f"diverged: {len(diverged) - SHOWN} more")
    early = sum(cell.outcome.get("kind") == "stopped_early" for cell in done)
    return [*lines, *([f"stopped early, by patience: {early} of {len(done)} cells"] if early else [])]


def _twins(done: Sequence[Cell]) -> list[str]:
    """Rows that are one run: what tells them apart reaches nothing in these cells."""
    labels: dict[tuple[str, int], list[str]] = {}
    for cell in done:
        if cell.digest:
            labels.setdefault((cell.digest, cell.seed), []).append(cell.label)
    same = dict.fromkeys(tuple(dict.fromkeys(each)) for each in labels.values())
    shown = [" = ".join(each) for each in same if len(each) > 1]
    shown = [*shown[:SHOWN], *([f"{len(shown) - SHOWN} more"] if len(shown) > SHOWN else [])]
    return [f"the same run, under several labels: {'; '.join(shown)}"] if shown else []


def _settings(rows: Sequence[Row]) -> list[str]:
    """In what rows differ beside the axes: a cell that was run again with other settings stands in its old place."""
    axes = {_ATTENTION if _within(path, _ATTENTION) else path for row in rows for path in row.axes}
    if WHOLE_CELL in axes:
        return []
    known = {row.label: spec for row in rows if (spec := next((cell.spec for cell in row.done if cell.spec), None))}
    first = next(iter(known.values()), {})
    paths = {path for spec in known.values() for path in differing(first, spec)} - {"seed"}
    lines = []
    for path in sorted(path for path in paths if not any(_within(path, axis) or _within(axis, path) for axis in axes)):
        values: dict[str, list[str]] = {}
        for label, spec in known.items():
            values.setdefault(said(spec, path) or "", []).append(label)
        shown = (f"{value} in {_few(labels)}" for value, labels in values.items() if value)
        lines.append(f"rows differ in what is no axis: {path} is {'; '.join(shown)}")
    return lines


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")


def _few(labels: Sequence[str]) -> str:
    return f"{', '.join(labels[:3])}{f' and {len(labels) - 3} more' if len(labels) > 3 else ''}"


def _precisions(done: Sequence[Cell]) -> list[str]:
    """Which cells were trained, in part at least, or searched on a device without instructions for what their spec asks
    for."""
    cells = {
        "trained": [
            cell for cell in done
            if (asked := cell.spec.get("train", {}).get("precision"))
            and any(attempt.get("precision", asked) != asked for attempt in cell.attempts if _trained(cell, attempt))
        ],
        "searched": [
            cell for cell in done
            if (asked := cell.spec.get("search", {}).get("precision"))
            and any(attempt.get("search_precision", asked) != asked for attempt in cell.attempts[-1:])
        ],
    }  # fmt: skip
    lines = []
    for what, other in cells.items():
        shown = [f"{cell.label}, seed {cell.seed}" for cell in other[:SHOWN]]
        shown += [f"{len(other) - SHOWN} more"] if len(other) > SHOWN else []
        lines += [f"{what} in float32 for want of bfloat16 instructions: {'; '.join(shown)}"] if other else []
    return lines


def _trained(cell: Cell, attempt: Mapping[str, Any]) -> bool:
    """Whether an attempt made updates; one that came after the last of them only scored."""
    return attempt.get("from_step", 0) < cell.metrics.get("train/steps", math.inf)


def _scored(cell: Cell) -> str:
    if not cell.weights:
        return "no checkpoint lies before it: no scores"
    return f"scored from its best checkpoint, step {', '.join(map(str, cell.weights))}"


def _unknown(rows: Sequence[Row], view: View) -> list[str]:
    known = {name for row in rows for name in row.stats}
    scores = ", ".join(sorted(name for name in known if names.higher_is_better(name) is not None))
    absent = [name for name in dict.fromkeys((*view.values, *view.extra)) if name not in known]
    near = {name: difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8) for name in absent}
    hints = {name: f"; did you mean {found[0]}?" if found else "" for name, found in near.items()}
    for name in absent:
        if names.last(name) == "seconds_per_epoch":
            hints[name] = ", which takes `train.validate_every: epoch`"
    return [f"no cell has measured {name}{hints[name]} (measured: {scores})" for name in absent if known]


def _apart(rows: Sequence[Row], view: View) -> list[str]:
    """Metrics of which not all rows are compared with one another, though they are scored by one rule."""
    apart = [
        names.title(metric)
        for metric in view.values
        if len({row.basis(metric) for row in rows if row.done}) > len({row.corpus for row in rows if row.done})
    ]
    return [f"rows whose text became other words or tokens are not compared in {', '.join(apart)}"] if apart else []


def _legend(rows: Sequence[Row], view: View, ranks: Ranks) -> list[str]:
    many = any(stat.n > 1 for row in rows for stat in row.stats.values())
    said = {
        "mean_std": "mean ± sample standard deviation (seeds)" if many else "(n): number of seeds",
        "mean": "mean (seeds)",
        "max": "best seed (seeds)",
    }[view.reduce]
    marks = []
    if any(rank.kind == "best" for rank in ranks.values()):
        marks.append("bold: best")
    if any(rank.kind == "tied" for rank in ranks.values()):
        marks.append(
            f"underlined: not significantly worse than the best (paired bootstrap over the {units(rows)[0]} of common "
            f"seeds, {SAMPLES} samples, p >= {LEVEL})"
        )
    whole = ["mean: of a line's columns, the dense model's apart"] if view.mean and pivot(rows, view) else []
    return ["; ".join([said, *marks]), *whole, *_untested(ranks)]


def _untested(ranks: Ranks) -> list[str]:
    """Rows without a mark that no test has found worse than the best, and columns of what is never tested."""
    never = [names.title(metric) for metric in dict.fromkeys(metric for _, metric in ranks) if not has_test(metric)]
    lines = [f"no test is made of {', '.join(never)}: rows without a mark may be level with the best"] if never else []
    left = [
        f"{label} ({names.title(metric)})"
        for (label, metric), rank in ranks.items()
        if has_test(metric) and rank.kind == "worse" and rank.p is None
    ]
    shown = [*left[:SHOWN], *([f"{len(left) - SHOWN} more"] if len(left) > SHOWN else [])]
    if left:
        lines.append(
            f"not tested, for want of common seeds, of saved lines that give the scores, or of {FEWEST} lines: "
            f"{', '.join(shown)}"
        )
    return lines


def units(rows: Sequence[Row]) -> tuple[str, str]:
    """What is tested, and what is one input."""
    tasks = [cell.spec.get("task", {}) for row in rows for cell in row.done]
    if not any(task.get("kind") == "document" for task in tasks):
        return "sentences", "sentences"
    return "documents", "blocks" if any(task.get("block") for task in tasks) else "sentences"


def _scores(rows: Sequence[Row], view: View) -> list[str]:
    lines = []
    done = [cell for row in rows for cell in row.done]
    for metric in dict.fromkeys((*view.values, *view.extra)):
        signatures = dict.fromkeys(cell.signatures[metric] for cell in done if metric in cell.signatures)
        lines += [f"{names.title(metric)}: {signature}" for signature in signatures]
    for metric in dict.fromkeys((*view.values, *view.extra)):
        bounds = {cell.metrics[f"{metric}_bound"] for cell in done if f"{metric}_bound" in cell.metrics}
        if metric.endswith("13a") and bounds and min(bounds) < _LOSSLESS:
            best = " or ".join(sorted(names.number(metric, bound) for bound in bounds))
            lines.append(
                f"{names.title(metric)}: an output equal to its reference has {best}, as its words cannot all be put "
                "together again as they were"
            )
    samples = sorted({cell.samples["attended"] for cell in done if "attended" in cell.samples})
    if samples and "attended" not in view.omit:
        of = f"{_list(samples)} {units(rows)[1]}"
        lines.append(f"attended: positions with weight above 0, mean over the queries of {of} of the validation set")
    return lines


def _cut_off(done: Sequence[Cell], view: View) -> list[str]:
    """Cells of whose outputs many have no end: scores of these tell of the limit, too."""
    lines = []
    for split in dict.fromkeys(metric.split("/")[0] for metric in (*view.values, *view.extra) if "/" in metric):
        found = []
        for cell in done:
            outputs = cell.samples.get(f"{split}/blocks", cell.samples.get(split, 0))  # of documents, a block is one
            cut = cell.metrics.get(f"{split}/unfinished", 0.0)
            if outputs and cut > _CUT * outputs:
                found.append(f"{cell.label}, seed {cell.seed}: {cut / outputs:.0%}")
        if found:
            more = f"; {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            lines.append(f"{split}: outputs cut off at the limit of the search: {'; '.join(found[:SHOWN])}{more}")
    return lines


def _origin(done: Sequence[Cell]) -> list[str]:
    commits = list(dict.fromkeys(commit for cell in done for commit in _commits(cell)))
    data = list(dict.fromkeys(name for cell in done if (name := cell.data.get("folder") or cell.data.get("digest"))))
    parts = []
    if commits:
        parts.append(f"commit {', '.join(commits)}")
    if data:
        parts.append(f"data {', '.join(data)}")
    seconds = total_seconds(done)
    if seconds:
        parts.append(f"{duration(seconds)} in all")
    return ["; ".join(parts)] if parts else []


def _shows_speeds(view: View) -> bool:
    shown = {"train/tokens_per_s", "decode/tokens_per_s"} - set(view.omit)
    return bool(shown) or any("tokens_per_s" in name or "seconds" in name for name in (*view.values, *view.extra))


def _speeds(done: Sequence[Cell]) -> list[str]:
    """What hinders a comparison of them."""
    lines = []
    machines = sorted({machine for cell in done for attempt in cell.attempts if (machine := _machine(attempt))})
    if len(machines) > 1:
        lines.append(f"speeds were measured on different machines: {'; '.join(machines)}")
    beside = [cell for cell in done if any(attempt.get("jobs", 1) > 1 for attempt in cell.attempts)]
    if beside:
        which = "" if len(beside) == len(done) else f" of {len(beside)} of the {len(done)} cells"
        lines.append(f"speeds{which} are of trainings with others beside them (--jobs)")
    shared = [cell for cell in done if cell.shared_seconds > max(0.0, _NOTICED * cell.seconds)]
    if shared:
        which = _few([f"{cell.label}, seed {cell.seed}" for cell in shared])
        lines.append(
            f"speeds of {len(shared)} of the {len(done)} cells ({which}) were measured while other programs used the "
            "same processor cores"
        )
    return lines


def _code(done: Sequence[Cell]) -> list[str]:
    """Mechanisms of which the table's cells have run more than one version."""
    versions: dict[str, dict[str, list[Cell]]] = {}
    for cell in done:
        for name, hash in cell.mechanisms.items():
            versions.setdefault(name, {}).setdefault(hash, []).append(cell)
    lines = []
    for name, found in versions.items():
        if len(found) > 1:
            parts = [", ".join(dict.fromkeys(cell.label for cell in cells)) for cells in found.values()]
            lines.append(
                f"{name} was another file for some cells than for others ({' | '.join(parts)}); --fresh makes all with "
                "the present one"
            )
    return lines


def _commits(cell: Cell) -> list[str]:
    """Of every attempt at the cell; a result without an environment says the last one's itself."""
    known = [(attempt.get("commit"), attempt.get("dirty")) for attempt in cell.attempts]
    said = [(commit, dirty) for commit, dirty in known if commit] or [(cell.commit, cell.dirty)]
    return [str(commit)[:12] + ("+changes" if dirty else "") for commit, dirty in said if commit]


def _machine(attempt: Mapping[str, Any]) -> str:
    parts = [str(attempt[key]) for key in ("device", "processor", "instructions") if attempt.get(key)]
    return ", ".join([*parts, *([f"threads {attempt['threads']}"] if attempt.get("threads") else [])])


def _list(values: Sequence[int]) -> str:
    return " or ".join(f"{value:,}" for value in values)


def duration(seconds: float) -> str:
    """In the unit that leaves two or three digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
