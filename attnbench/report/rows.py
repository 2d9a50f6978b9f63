"""Cells grouped over seeds: mean, spread and n of every metric, and the refusal to mix what cannot be compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnbench.core.errors import AttnbenchError
from attnbench.core.run_files import WHOLE_CELL
from attnbench.core.spec import differing
from attnbench.report.collect import Cell, Scalar

_TRAINING = ("train", "more", "pairs", "news_commentary", "valid", "hold_every")
"""Fields of datasets that say what to train on, and choose checkpoints by."""
OWN_TEXT = ("parallel", "documents")
"""Corpora of the user's own files."""
_OF_TOKENS, _OF_WORDS = ("loss", "nll", "ppl"), ("rep", "drop")
_TO_WORDS = ("pretokenize", "normalize", "split_hyphens", "lowercase")
_TO_TOKENS = (*_TO_WORDS, "dataset", "tokenizer", "block")
"""Fields of a task that say how text becomes words, and tokens of a vocabulary, which the training text teaches."""


@dataclass(frozen=True)
class Stat:
    """One metric over the seeds of a row. std: the sample standard deviation, None for one seed."""

    mean: float
    std: float | None
    highest: float
    lowest: float
    seeds: Mapping[int, float]

    @property
    def n(self) -> int:
        return len(self.seeds)

    @classmethod
    def of(cls, seeds: Mapping[int, float]) -> Stat:
        values = list(seeds.values())
        whole = all(math.isfinite(value) for value in values)
        mean = statistics.fmean(values) if whole else sum(values) / len(values)
        std = statistics.stdev(values) if whole and len(values) > 1 else None
        return cls(mean, std, max(values), min(values), dict(seeds))


@dataclass(frozen=True)
class Row:
    """The cells that differ in nothing but the seed. stats: over those that are done."""

    label: str
    axes: Mapping[str, Scalar]
    cells: tuple[Cell, ...]
    stats: Mapping[str, Stat]

    @property
    def done(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.status == "done")

    @property
    def status(self) -> str:
        """What stands in the place of a number when no cell is done; 'done' and 'partial' otherwise."""
        if self.done:
            return "done" if len(self.done) == len(self.cells) else "partial"
        for status in ("failed", "running", "interrupted"):
            if any(cell.status == status for cell in self.cells):
                return status
        return "queued"

    @property
    def corpus(self) -> str:
        """What it is scored on, as far as its spec tells, in words that are equal where that is the same."""
        spec = next((cell.spec for cell in self.cells if cell.spec.get("task")), None)
        if spec is not None:
            return repr(_tested(spec["task"].get("dataset")))
        axes = [(path.split("."), value) for path, value in self.axes.items() if path.startswith("task.dataset")]
        return repr([(path, value) for path, value in axes if len(path) < 3 or path[2] not in _TRAINING])

    def basis(self, metric: str) -> str:
        """What its numbers of a metric are counted in, as far as its spec tells, in words that are equal where that is
        the same: tokens of its vocabulary, words of its own tokenisation, or text as people write it."""
        task = next((cell.spec["task"] for cell in self.cells if cell.spec.get("task")), {})
        name = metric.rsplit("/", 1)[-1]
        in_words = name in _OF_WORDS or any("tok:none" in signature for signature in self.signatures(metric))
        fields = _TO_TOKENS if name in _OF_TOKENS else _TO_WORDS if in_words else ()
        return repr([task.get(each) for each in fields])

    def signatures(self, metric: str) -> frozenset[str]:
        """How its cells were scored in a metric, as far as they say."""
        return frozenset(cell.signatures[metric] for cell in self.done if metric in cell.signatures)

    def coordinate(self, name: str) -> tuple[str | None, Scalar]:
        """(the axis behind it, the value) of `label`, `budget` or a whole dotted path; (None, None) if it has none."""
        if name in self.axes:
            return name, self.axes[name]
        for path, value in self.axes.items():
            if path.rsplit(".", 1)[-1] == name:
                return path, value
        return None, self.cells[0].row.get(name)


def _tested(dataset: Any) -> Any:
    """The fields of a dataset that decide its test set; one without files of its own is part of the training text."""
    if not isinstance(dataset, Mapping) or (dataset.get("kind") in OWN_TEXT and not dataset.get("test")):
        return dataset
    return {name: value for name, value in dataset.items() if name not in _TRAINING}


def group(cells: Iterable[Cell]) -> list[Row]:
    """Rows and their cells in grid order. Raises AttnbenchError where two cells cannot share a table."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[Cell]] = {}
    for cell in cells:
        key = cell.label, tuple((path, repr(value)) for path, value in cell.axes.items())
        found.setdefault(key, []).append(cell)
    rows = [_row(label, members) for (label, _), members in found.items()]
    refuse_mixtures(rows)
    return _distinct(rows)


def _row(label: str, cells: Sequence[Cell]) -> Row:
    done = [cell for cell in cells if cell.status == "done"]
    names = dict.fromkeys(name for cell in done for name in cell.metrics)
    stats = {name: Stat.of({cell.seed: cell.metrics[name] for cell in done if name in cell.metrics}) for name in names}
    return Row(label, dict(cells[0].axes), tuple(cells), stats)


def _distinct(rows: list[Row]) -> list[Row]:
    """Rows with labels of their own: where two share one, the axes in which they differ are added."""
    labels = [row.label for row in rows]
    named = []
    for row in rows:
        twins = [other for other in rows if other.label == row.label]
        if labels.count(row.label) > 1:
            differ = [path for path in row.axes if len({repr(twin.axes.get(path)) for twin in twins}) > 1]
            extra = ", ".join(f"{path.rsplit('.', 1)[-1]}={row.axes[path]}" for path in differ)
            row = replace(row, label=f"{row.label} ({extra})")
        named.append(row)
    return named


def refuse_mixtures(rows: Iterable[Row]) -> None:
    """Raise AttnbenchError, naming cells, where done cells of a row are not seeds of one system, or where any were
    scored differently or on different data.

    Cells that differ on an axis of the task, or in the task that an axis of whole cells gives them, are on different
    data on purpose: each such group is judged apart.
    """
    groups: dict[str, list[Cell]] = {}
    for row in rows:
        _seeds_of_one_system(row.done)
        task = repr([(path, value) for path, value in row.axes.items() if path.split(".", 1)[0] == "task"])
        for cell in row.done:  # an axis of whole cells may change the task too: their specs say whether it does
            own = repr(cell.spec.get("task")) if WHOLE_CELL in row.axes else ""
            groups.setdefault(task + own, []).append(cell)
    for cells in groups.values():
        for metric in sorted({name for cell in cells for name in cell.signatures}):
            _one(f"the signature of {metric}", [(cell, cell.signatures.get(metric)) for cell in cells])
        for part in ("folder", "digest", "content_sha256"):
            _one(f"the data ({part})", [(cell, cell.data.get(part)) for cell in cells])


def _seeds_of_one_system(cells: Sequence[Cell]) -> None:
    mend = "run them with the same settings, or give those of others a table of its own (--set name=NAME)"
    known = [cell for cell in cells if cell.spec]
    for path in sorted({path for cell in known for path in differing(known[0].spec, cell.spec)} - {"seed"}):
        _one(f"{path} of one row", [(cell, said(cell.spec, path)) for cell in known], mend)
    seen: dict[int, Cell] = {}
    for cell in cells:
        if (twin := seen.setdefault(cell.seed, cell)) is not cell:
            what = f"seed {cell.seed} stands twice in one row, the digest"
            _one(what, [(each, each.digest) for each in (twin, cell)], mend)


def said(spec: Mapping[str, Any], path: str) -> str | None:
    """What a spec says at a path, for a message; None where it says nothing."""
    node: Any = spec
    for name in path.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return None
        node = node[name]
    return repr(node)


_MEND = "delete result.json of those that are out of date and run them again, or report them apart"


def _one(what: str, values: Sequence[tuple[Cell, str | None]], mend: str = _MEND) -> None:
    kinds: dict[str, list[str]] = {}
    for cell, value in values:
        if value:
            kinds.setdefault(value, []).append(cell.folder.name)
    if len(kinds) > 1:
        rows = "\n".join(
            f"  {value}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
            for value, names in kinds.items()
        )
        raise AttnbenchError(f"the cells cannot share a table, {what} differs:\n{rows}\n  {mend}")
