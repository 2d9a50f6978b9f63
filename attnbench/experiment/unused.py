"""What a spec sets and nothing comes of, told before a run: such rows of a table are one system under two names."""

from __future__ import annotations

from collections.abc import Iterator

from attnbench.core.files import YamlPath
from attnbench.core.spec import dotted, unused_fields
from attnbench.experiment.grid import Cell, Experiment


def unused(experiment: Experiment) -> Iterator[str]:
    """A line for each setting that changes nothing: where it was given, its path, why, and in which cells if not all.

    Fields (Spec.unused), two entries of an axis that make the same runs everywhere, and seeds that no cell has.
    """
    document, cells = experiment.document, experiment.cells
    found: dict[tuple[YamlPath, str], list[Cell]] = {}
    for cell in cells:
        for path, why in unused_fields(cell.spec):
            found.setdefault((path, why), []).append(cell)
    for (path, why), some in found.items():
        labels = dict.fromkeys(cell.label for cell in some)
        of = "" if len(some) == len(cells) else f" (of {', '.join(labels)})"
        yield f"{document.at(*path)}: {dotted(path)} changes nothing{of}: {why}"
    yield from _same_runs(experiment)
    yield from _seeds(experiment)


def _same_runs(experiment: Experiment) -> Iterator[str]:
    """Axes of which two entries are the same run, whatever the others are."""
    for axis in experiment.cells[0].axes:
        runs: dict[object, dict[object, str]] = {}
        for cell in experiment.cells:
            rest = (cell.seed, *(value for path, value in cell.axes.items() if path != axis))
            runs.setdefault(cell.axes[axis], {})[rest] = cell.digest
        first: dict[frozenset[tuple[object, str]], object] = {}
        for label, digests in runs.items():
            other = first.setdefault(frozenset(digests.items()), label)
            if other != label:
                where = experiment.document.at("grid", "axes", axis)
                yield (f"{where}: grid.axes.{axis}: '{other}' and '{label}' are the same run in every cell; what they "
                       "set is set again elsewhere, or is spent on nothing")  # fmt: skip


def _seeds(experiment: Experiment) -> Iterator[str]:
    document = experiment.document
    grid = document.raw.get("grid") or {}
    if "seed" in document.raw and grid.get("seeds"):
        yield f"{document.at('seed')}: seed changes nothing: grid.seeds takes its place"
