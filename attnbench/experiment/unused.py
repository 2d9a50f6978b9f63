"""What a spec sets and nothing comes of, told before a run: such rows of a table are one system under two names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from attnbench.attention.types import ROLES
from attnbench.core.files import YamlPath
from attnbench.core.spec import Spec, dotted, location, unused_fields
from attnbench.experiment.document import header_of, label_of
from attnbench.experiment.grid import Cell, Experiment, node_at
from attnbench.models.transformer import PRESETS


def unused(experiment: Experiment) -> Iterator[str]:
    """A line for each setting that changes nothing: where it was given, its path, why, and in which cells if not all.

    Fields (Spec.unused), two entries of an axis that make the same runs everywhere, fields that an entry of another
    kind leaves behind, a preset beside all of its sizes, and a seed that no cell has.
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
    yield from _left_behind(experiment)
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


def _left_behind(experiment: Experiment) -> Iterator[str]:
    """Fields of a section that an axis entry of another kind has, too, and takes no value of."""
    document = experiment.document
    for axis, values in header_of(document).grid.axes.items():
        names = axis.split(".")
        below = node_at(document.raw, tuple(names))
        for index, value in enumerate(values):
            entry = {"kind": value} if isinstance(value, str) else value
            cell = next((cell for cell in experiment.cells if cell.axes[axis] == label_of(value)), None)
            if not isinstance(below, Mapping) or not isinstance(entry, Mapping) or cell is None:
                continue
            made = functools.reduce(lambda spec, name: getattr(spec, name, None), names, cell.spec)
            if entry.get("kind", below.get("kind")) == below.get("kind") or not isinstance(made, Spec):
                continue
            has = made.dump()
            lost = [
                name for name in below if name in has and name not in ("kind", *entry)
                and not _holds(has[name], below[name])
                and not any(f"{each}.".startswith(f"{axis}.{name}.") for each in cell.axes)
            ]  # fmt: skip
            if lost:
                yield (
                    f"{document.at('grid', 'axes', axis, index)}: grid.axes.{axis}: '{label_of(value)}' is of another "
                    f"kind and begins anew: it does not take over {', '.join(lost)}; write what it is to have, too"
                )


def _holds(whole: object, given: object) -> bool:
    """Whether a resolved value has all that is given of it."""
    if isinstance(whole, Mapping):
        named = {"kind": given} if isinstance(given, str) else given
        return isinstance(named, Mapping) and all(name in whole and _holds(whole[name], named[name]) for name in named)
    return whole == given


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
