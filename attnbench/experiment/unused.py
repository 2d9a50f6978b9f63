"""What a spec sets and nothing comes of, told before a run: such rows of a table are one system under two names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attnbench.attention.types import ROLES
from attnbench.core.files import YamlPath
from attnbench.core.spec import dotted, location, unused_fields
from attnbench.experiment.grid import Cell, Experiment
from attnbench.models.transformer import PRESETS


def unused(experiment: Experiment) -> Iterator[str]:
    """A line for each setting that changes nothing: where it was given, its path, why, and in which cells if not all.

    Fields (Spec.unused), two entries of an axis that make the same runs everywhere, a preset beside all of its sizes,
    and a seed that no cell has.
    """
    cells = experiment.cells
    found: dict[tuple[str, str], tuple[dict[str, None], list[Cell]]] = {}
    for cell in cells:
        for path, why in unused_fields(cell.spec):
            where = location(experiment.document.source, _line(cell, path))
            paths, some = found.setdefault((where, why), ({}, []))
            paths[dotted(path)] = None
            if cell not in some[-1:]:
                some.append(cell)
    for (where, why), (paths, some) in found.items():
        labels = dict.fromkeys(cell.label for cell in some)
        of = "" if len(some) == len(cells) else f" (of {', '.join(labels)})"
        yield f"{where}: {', '.join(paths)} {'changes' if len(paths) == 1 else 'change'} nothing{of}: {why}"
    yield from _same_runs(experiment)
    yield from _of_all_cells(experiment)


def _line(cell: Cell, path: YamlPath) -> int | str | None:
    """Where a path of a cell was given, or its nearest parent; a site of attention may have it of `default`."""
    shared = tuple("default" if part in ROLES and path[place - 1] == "attention" else part
                   for place, part in enumerate(path))  # fmt: skip
    for end in range(len(path), 0, -1):
        for known in (path[:end], shared[:end]):
            if known in cell.lines:
                return cell.lines[known]
    return None


def _same_runs(experiment: Experiment) -> Iterator[str]:
    """Axes of which two entries are the same run, whatever the others are."""
    for axis in experiment.cells[0].axes:
        runs: dict[str, dict[object, str]] = {}
        for cell in experiment.cells:
            rest = (cell.seed, *(str(label) for path, label in cell.axes.items() if path != axis))
            runs.setdefault(str(cell.axes[axis]), {})[rest] = cell.digest
        known: list[str] = []
        for label, digests in runs.items():
            other = next((each for each in known if _alike(runs[each], digests)), None)
            if other is None:
                known.append(label)
            else:
                where = experiment.document.at("grid", "axes", axis)
                yield f"{where}: grid.axes.{axis}: '{other}' and '{label}' are the same run in every cell; drop one"


def _alike(ours: Mapping[object, str], theirs: Mapping[object, str]) -> bool:
    """Whether cells are the same run wherever both entries have one; they may have other seeds besides."""
    both = ours.keys() & theirs.keys()
    return bool(both) and all(ours[each] == theirs[each] for each in both)


def _of_all_cells(experiment: Experiment) -> Iterator[str]:
    document = experiment.document
    if (seed := document.raw.get("seed")) is not None and seed not in {cell.seed for cell in experiment.cells}:
        yield f"{document.at('seed')}: seed changes nothing: every cell has another"
    model = document.raw.get("model")
    if not isinstance(model, Mapping) or model.get("kind", "transformer") != "transformer":
        return
    if (sizes := PRESETS.get(str(model.get("preset")))) and sizes.keys() <= model.keys():
        yield f"{document.at('model', 'preset')}: model.preset changes nothing: {', '.join(sizes)} are all given"
