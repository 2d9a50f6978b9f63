"""Tables for programs: the content of results.json and results.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from attnbench.core.run_files import RESULT
from attnbench.report.collect import Cell, Experiment
from attnbench.report.compare import BESIDE, Comparison, Reported
from attnbench.report.layout import View
from attnbench.report.names import higher_is_better
from attnbench.report.rank import Ranks
from attnbench.report.rows import Row, Stat

SCHEMA_VERSION = 1


def document(
    experiment: Experiment, rows: Sequence[Row], view: View, ranks: Ranks, compared: Comparison
) -> dict[str, object]:
    """results.json.

    A metric that is not finite is null, and so is `<metric>_std` of one seed; `<metric>_p` is that of the paired test
    against the best row; `<metric>_n` stands where fewer seeds than `n_seeds` have the metric.
    """
    done = [cell for row in rows for cell in row.done]
    content = {
        "schema_version": SCHEMA_VERSION,
        "name": experiment.name,
        "results": {row.label: _row(row, view, ranks, compared) for row in rows},
        "configs": {row.label: _config(row) for row in rows},
        "metrics": _metrics(rows, done),
        "data": {**_united([cell.data for cell in done]), "n_samples": _united([cell.samples for cell in done])},
        "git_hash": ",".join(dict.fromkeys(cell.commit for cell in done if cell.commit)),
        "dirty": any(cell.dirty for cell in done),
        "date": _date(done),
        "env": _united([_environment(attempt) for cell in done for attempt in cell.attempts]),
        "command": experiment.command,
        "total_seconds": total_seconds(done),
    }
    return {key: _sayable(value) for key, value in content.items()}


def total_seconds(done: Iterable[Cell]) -> float:
    """Of all cells; what stands under several labels is one run."""
    return sum({(cell.digest or str(cell.folder), cell.seed): cell.seconds for cell in done}.values())


def _sayable(value: Any) -> Any:
    """JSON has no infinity: a spec that says `inf` says it as a string."""
    if isinstance(value, Mapping):
        return {str(key): _sayable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sayable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _row(row: Row, view: View, ranks: Ranks, compared: Comparison) -> dict[str, object]:
    content: dict[str, object] = {}
    for metric, stat in row.stats.items():
        content[metric] = _finite(stat.mean)
        content[f"{metric}_std"] = _finite(stat.std)
        if stat.n != len(row.done):
            content[f"{metric}_n"] = stat.n
        rank = ranks.get((row.label, metric))
        if rank is not None and rank.p is not None:
            content[f"{metric}_p"] = rank.p
    content["n_seeds"] = len(row.done)
    content["per_seed"] = {
        str(cell.seed): {metric: _finite(value) for metric, value in cell.metrics.items()} for cell in row.done
    }
    content["outcomes"] = {str(cell.seed): dict(cell.outcome) for cell in row.done if cell.outcome}
    content["status"] = row.status
    content["axes"] = dict(row.axes)
    open_cells = {
        str(cell.seed): {"status": cell.status, "reason": cell.reason} for cell in row.cells if cell.status != "done"
    }
    if open_cells:
        content["unfinished"] = open_cells
    paper = {metric: _number(number) for metric, number in papers(row, view, compared).items()}
    if paper:
        content["paper"] = paper
    return content


def papers(row: Row, view: View, compared: Comparison) -> dict[str, Reported]:
    """Our metric -> the paper's number for it."""
    numbers = {metric: compared.beside(row, metric, view.values) for metric in (*view.values, *BESIDE)}
    return {metric: number for metric, number in numbers.items() if number is not None}


def _number(number: Reported) -> dict[str, object]:
    about = {"table": number.table, "dataset": number.dataset, "metric": number.metric, "system": number.system}
    rest = {key: value for key, value in (("k", number.k), ("confidence", number.confidence)) if value is not None}
    return {"value": number.value, "source": number.source, **about, **rest}


def _config(row: Row) -> dict[str, Any]:
    spec = dict(next((cell.spec for cell in row.cells if cell.spec), {}))
    return {key: value for key, value in spec.items() if key not in ("grid", "table", "seed")}


def _metrics(rows: Sequence[Row], done: Sequence[Cell]) -> dict[str, object]:
    signatures = _united(cell.signatures for cell in done)
    return {
        name: {"higher_is_better": higher_is_better(name), "signature": signatures.get(name)}
        for name in dict.fromkeys(name for row in rows for name in row.stats)
    }


def _united(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What all records say; a list of the values where they differ."""
    values: dict[str, list[Any]] = {}
    for record in records:
        for key, value in record.items():
            if value not in values.setdefault(key, []):
                values[key].append(value)
    return {key: found[0] if len(found) == 1 else found for key, found in values.items()}


def _environment(attempt: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attempt.items() if key != "from_step"}


def _date(done: Sequence[Cell]) -> str | None:
    """When the last cell was done, so that the same cells give the same file."""
    said = [cell.finished for cell in done if cell.finished]
    if said:
        return max(said)
    times = [(cell.folder / RESULT).stat().st_mtime for cell in done]
    return datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def csv_text(rows: Sequence[Row], view: View, compared: Comparison) -> str:
    """One line a row: label, axes, how far it is, every metric with its spread, full precision, the paper's numbers."""
    axes = list(dict.fromkeys(path for row in rows for path in row.axes))
    metrics = list(dict.fromkeys(name for row in rows for name in row.stats))
    theirs = [papers(row, view, compared) for row in rows]
    named = list(dict.fromkeys(metric for found in theirs for metric in found))
    of_fewer = {name for row in rows for name, stat in row.stats.items() if stat.n != len(row.done)}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([
        "row", *(axis for axis in axes), "status", "n_seeds", "n_cells", "reason", "outcome",
        *(column for metric in metrics for column in _columns(metric, counted=metric in of_fewer)),
        *(column for metric in named for column in (f"paper/{metric}", f"paper/{metric}_source")),
    ])  # fmt: skip
    for row, found in zip(rows, theirs, strict=True):
        reason = next((cell.reason for cell in row.cells if cell.reason), "")
        numbers = [found.get(metric) for metric in named]
        writer.writerow([
            row.label, *(_blank(row.axes.get(axis)) for axis in axes),
            row.status, len(row.done), len(row.cells), reason, _outcome(row),
            *(value for metric in metrics for value in _values(row.stats.get(metric), counted=metric in of_fewer)),
            *(value for number in numbers for value in ((number.value, number.source) if number else ("", ""))),
        ])  # fmt: skip
    return out.getvalue()


def _columns(metric: str, *, counted: bool) -> list[str]:
    return [metric, f"{metric}_std", *([f"{metric}_n"] if counted else [])]


def _values(stat: Stat | None, *, counted: bool) -> list[object]:
    found: list[object] = ["", "", ""] if stat is None else [stat.mean, _blank(stat.std), stat.n]
    return found if counted else found[:2]


def _outcome(row: Row) -> str:
    """How the trainings of a row ended: one text where all ended alike."""
    texts = {cell.seed: str(cell.outcome["text"]) for cell in row.done if cell.outcome.get("text")}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"seed {seed} {text}" for seed, text in texts.items())


def _blank(value: object) -> object:
    return "" if value is None else value
