"""From a document to cells: axes multiplied and merged, every cell validated at its own lines."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from attnbench.core.errors import SpecError
from attnbench.core.files import YamlPath
from attnbench.core.run_files import WHOLE_CELL
from attnbench.core.spec import spec_error, unknown
from attnbench.experiment.document import Document, Raw, header_of, label_of, mark, set_at, speaks_for_itself
from attnbench.experiment.spec import CellSpec, Header, TableSpec


@dataclass(frozen=True)
class Cell:
    """One run to make. axes: path -> label. row: what tables may group by. label: the axes' labels, joined. lines:
    where each path of its spec was given: the line of the document, or the place itself."""

    label: str
    seed: int
    axes: Mapping[str, str | int | float | bool | None]
    spec: CellSpec
    digest: str
    lines: Mapping[YamlPath, int | str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def folder(self) -> str:
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.label).strip("-") or "run"
        return f"{slug[:60]}-s{self.seed}-{self.digest[:8]}"

    def entry(self) -> dict[str, Any]:
        """Its line in grid.json."""
        row = {"label": self.label, **self.axes}
        return {
            "label": self.label, "digest": self.digest, "folder": self.folder, "seed": self.seed,
            "axes": dict(self.axes), "row": row,
        }  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """A validated grid of cells. document: what it came from. part: cells chosen from a grid, not the whole of it.
    seeds: those that took the place of the grid's own."""

    name: str
    table: TableSpec
    cells: tuple[Cell, ...]
    document: Document
    part: bool = False
    seeds: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        return self.name.rsplit("/", 1)[-1]


Given = tuple[YamlPath, int | str]
"""A path of a spec, and the line or the option that gave it."""
Pick = tuple[str, int, Any]
"""An entry of an axis: the axis, its number there, and what it holds."""


def expand(document: Document, *, seeds: Sequence[int] = ()) -> Experiment:
    """Every cell of the document's grid, in the order written, each validated.

    seeds: take the place of the grid's own. Raises SpecError that names file, line and path of each fault.
    """
    header = header_of(document)
    base = {key: value for key, value in document.raw.items() if key in CellSpec.model_fields}
    axes = [(path, list(enumerate(values))) for path, values in header.grid.axes.items()]
    chosen = list(seeds) or header.grid.seeds or [None]
    named = _labels(header.grid.axes, document)
    for label in header.grid.more_seeds:
        if label not in named:
            where = document.at("grid", "more_seeds", label)
            raise SpecError(f"{where}: grid.more_seeds: {unknown('label', label, sorted(named))}")
    if base.get("seed") is not None and not isinstance(base["seed"], int) and chosen != [None]:
        _cell(base, [(path, *values[0]) for path, values in axes], None, document)  # the grid's would hide it
    cells: list[Cell] = []
    callers: dict[str, Sequence[Pick]] = {}
    heeded: set[Given] = set()
    for combination in itertools.product(*(values for _, values in axes)):
        picks = [(path, index, value) for (path, _), (index, value) in zip(axes, combination, strict=True)]
        labels = [str(label_of(value)) for _, _, value in picks]
        own = next((header.grid.more_seeds[label] for label in labels if label in header.grid.more_seeds), chosen)
        for seed in chosen if seeds else own:
            cell, origins = _cell(base, picks, seed, document)
            _require_own_name(cell, picks, callers.setdefault(cell.label, picks), document)
            cells.append(cell)
            heeded |= origins
    _require_heeded(document, heeded)
    twins: dict[str, Cell] = {}
    for cell in cells:
        twin = twins.setdefault(cell.digest, cell)
        if twin.label == cell.label and twin is not cell:
            where = document.at("grid", "axes")
            raise SpecError(f"{where}: grid.axes: two cells are the same run: '{cell.label}', seed {cell.seed}")
    return Experiment(header.name, _table(header, cells, document), tuple(cells), document, seeds=tuple(seeds))


def _require_own_name(cell: Cell, picks: Sequence[Pick], others: Sequence[Pick], document: Document) -> None:
    """Raise SpecError where other entries join to the same label: one row would be of two systems."""
    parted = [(mine, theirs) for mine, theirs in zip(picks, others, strict=True) if mine[:2] != theirs[:2]]
    if parted:
        ours, former = (" with ".join(f"'{label_of(pick[2])}'" for pick in side) for side in zip(*parted, strict=True))
        where = document.at("grid", "axes", *parted[0][0][:2])
        raise SpecError(
            f"{where}: grid.axes: two cells are called '{cell.label}', {former} and {ours}; give one of these entries "
            "another `label`"
        )


def _require_heeded(document: Document, heeded: Set[Given]) -> None:
    """Raise SpecError for a `--set` of which no cell keeps anything."""
    for path, origin in document.lines.items():
        if not str(origin).startswith(f"--set {'.'.join(map(str, path))}=") or (path, origin) in heeded:
            continue
        if path[0] in CellSpec.model_fields:
            mend = "name seeds with --seeds" if path == ("seed",) else "change the axis, or leave it out"
            raise SpecError(f"{origin}: changes nothing, every cell of the grid has its own; {mend}")


def _table(header: Header, cells: Sequence[Cell], document: Document) -> TableSpec:
    """The table over the axes that there are; one that names no metric shows that of the task.

    Rows of an axis that the command line took away, or of a budget that no axis has, are the labels. Raises SpecError
    where rows or columns name what is no axis.
    """
    table, axes = header.table, list(header.grid.axes)
    known, once = ["label", *_called(axes)], _called(document.axes)
    changed: dict[str, Any] = {} if "value" in table.model_fields_set else {"value": cells[0].spec.task.primary}
    rows, cols = (
        _meant(getattr(table, key), axes, f"{document.at('table', key)}: table.{key}") for key in ("rows", "cols")
    )
    if table.cols == "label" or (cols is not None and cols == rows):
        what = "a label is no axis" if table.cols == "label" else f"the rows are of that axis ({rows})"
        raise SpecError(f"{document.at('table', 'cols')}: table.cols: {what}; name another axis, or leave it out")
    for key, instead in (("rows", "label"), ("cols", None)):
        named = getattr(table, key)
        if named is None or named in known:
            continue
        if axes and named not in once and named.rsplit(".", 1)[-1] != "budget":
            raise SpecError(f"{document.at('table', key)}: table.{key}: {unknown('axis', named, known)}")
        changed[key] = instead
    return table.model_copy(update=changed)


def _meant(name: str | None, axes: Sequence[str], where: str) -> str | None:
    """The axis that a table calls so, None where it calls none. Raises SpecError where it may be either of two."""
    found = [name] if name in axes else [path for path in axes if path.rsplit(".", 1)[-1] == name]
    if len(found) > 1:
        raise SpecError(f"{where}: '{name}' may be {' or '.join(map(str, found))}; write the whole path")
    return found[0] if found else None


def _called(axes: Iterable[str]) -> list[str]:
    """What a table may call them: by the whole path, or by its last name."""
    return [name for path in axes for name in dict.fromkeys((path, path.rsplit(".", 1)[-1]))]


def _labels(axes: Mapping[str, list[Any]], document: Document) -> set[str]:
    """The labels of every axis. Raises SpecError where an entry has none that can be read, and where two entries of one
    axis share theirs: rows would mix."""
    named: set[str] = set()
    for path, values in axes.items():
        own: set[str] = set()
        for index, value in enumerate(values):
            label = str(label_of(value))
            where = f"{document.at('grid', 'axes', path, index)}: grid.axes.{path}"
            if isinstance(value, Mapping) and not isinstance(value.get("label", ""), str | int | float):
                raise SpecError(f"{where}: a `label` is a text or a number, not {value['label']!r}")
            if not label.strip():
                raise SpecError(f"{where}: this entry is called nothing; give it a `label`")
            if label in own:
                raise SpecError(f"{where}: two entries are called '{label}'; give each its `label`")
            own.add(label)
        named |= own
    return named


def _cell(base: Raw, picks: Sequence[Pick], seed: int | None, document: Document) -> tuple[Cell, set[Given]]:
    """The cell, and what of it was given where."""
    raw = copy.deepcopy(base)
    lines = dict(document.lines)
    axes: dict[str, str | int | float | bool | None] = {}
    labels, origins = [], set[Given]()
    for path, _, value in picks:
        axes[path] = own = label_of(value)
        labels.append(str(own) if speaks_for_itself(value) else f"{path.rsplit('.', 1)[-1]}-{own}")
    label = " ".join(labels) or "run"
    for path, index, value in sorted(picks, key=lambda pick: _depth(pick[0])):  # what is within lies over the whole
        content = {key: item for key, item in value.items() if key != "label"} if isinstance(value, Mapping) else value
        entry, target = ("grid", "axes", path, index), () if path == WHOLE_CELL else tuple(path.split("."))
        if isinstance(document.lines.get(("grid", "axes", path)), str):
            # who names an axis on the command line knows what it lays over
            origins |= {(at, line) for at, line in lines.items() if at[: len(target)] == target[: len(at)]}
        before = copy.deepcopy(raw)
        try:
            _lay(raw, path, content)
        except ValueError as error:
            raise SpecError(f"{document.at(*entry)}: grid.axes.{path}.{index}: {error}") from None
        _forget(lines, target, node_at(before, target), node_at(raw, target))
        _move_lines(lines, entry, target, document.at(*entry))
    _require_kinds(raw, picks, document)
    if seed is not None:
        raw["seed"] = seed
        lines.pop(("seed",), None)
    try:
        spec = CellSpec.model_validate(raw)
    except ValidationError as error:
        rows, own = str(spec_error(error, document.source, lines)).splitlines(), _of_base(base, picks, seed, document)
        told = [row if row.startswith(own) else f"{row} (in the cell '{label}')" for row in rows]
        raise SpecError("\n".join(told) + _mend(base, picks, seed, document)) from None
    return Cell(label, spec.seed, axes, spec, spec.digest(), lines), origins | set(lines.items())


def _require_kinds(raw: Raw, picks: Sequence[Pick], document: Document) -> None:
    """Raise SpecError where an entry, as a piece of a cell, puts another kind into the place of one that an axis names:
    the row would be called by what it is not."""
    for path, index, value in picks:
        kind = value.get("kind") if isinstance(value, Mapping) else value
        node = node_at(raw, tuple(path.split(".")))
        if path == WHOLE_CELL or not isinstance(kind, str) or not isinstance(node, Mapping) or "kind" not in node:
            continue
        if node["kind"] != kind:
            raise SpecError(
                f"{document.at('grid', 'axes', path, index)}: grid.axes.{path}: '{label_of(value)}' gives way to the "
                f"kind '{node['kind']}', which an entry of another axis names; leave one of the two axes out (the "
                "spec's own by --set 'grid.axes={}')"
            )


def _of_base(base: Raw, picks: Sequence[Pick], seed: int | None, document: Document) -> tuple[str, ...]:
    """How faults begin that need no cell to be named: those of the spec without its axes, and within their entries."""
    if not picks:
        return ("",)
    entries = [("grid", "axes", path, index) for path, index, _ in picks]
    found = [f"{document.at(*at)}:" for at in document.lines if at[:4] in entries]
    try:
        _cell(base, [], seed, document)
    except SpecError as error:
        found += str(error).splitlines()
    return tuple(found)


def _mend(base: Raw, picks: Sequence[Pick], seed: int | None, document: Document) -> str:
    """What helps a cell at the crossing of the spec's own axes with others, if those alone would do."""
    given = [pick for pick in picks if isinstance(document.lines.get(("grid", "axes", pick[0])), str)]
    own = [path for path, _, _ in picks if path not in {pick[0] for pick in given}]
    if not given or not own:
        return ""
    try:
        _cell(base, given, seed, document)
    except SpecError:
        return ""
    return f"\nThis is a cell of the spec's own axes too ({', '.join(own)}); to leave those out: --set 'grid.axes={{}}'"


def _depth(axis: str) -> float:
    """How far within a cell an axis lies; pieces of cells lie over whole sections, and under what a path names."""
    return 0.5 if axis == WHOLE_CELL else axis.count(".")


def _lay(raw: Raw, path: str, content: Any) -> None:
    """Merge an axis entry into the node that it names; on the axis of whole cells, each of its keys into its own."""
    if path != WHOLE_CELL:
        set_at(raw, path, content, merge=True)
        return
    known = [name for name in CellSpec.model_fields if name != "seed"]
    if not isinstance(content, Mapping):
        raise ValueError(f"an entry of the axis '{WHOLE_CELL}' is a mapping with keys of {', '.join(known)}")
    for name, value in content.items():
        if name not in known:
            raise ValueError(unknown("key", str(name), known))
        set_at(raw, name, value, merge=True)


def node_at(raw: Any, path: YamlPath) -> Any:
    """What stands at a path of nested mappings; None where it leads nowhere."""
    for name in path:
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw


def _forget(lines: dict[YamlPath, int | str], path: YamlPath, before: Any, after: Any) -> None:
    """Drop the places of what an axis entry has replaced."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key, value in before.items():
            _forget(lines, (*path, key), value, after.get(key))
    elif before != after:
        for at in [at for at in lines if at[: len(path)] == path]:
            del lines[at]


def _move_lines(lines: dict[YamlPath, int | str], entry: YamlPath, target: YamlPath, where: str) -> None:
    """Faults in what an axis entry set are told at the entry's own places."""
    for at, line in list(lines.items()):
        if at[: len(entry)] == entry and (target or at != entry):
            lines[(*target, *at[len(entry) :])] = line
    mark(lines, target, where)


def only(experiment: Experiment, label: str | None) -> Experiment:
    """The experiment with the cells called `label`; None will do where all cells have one label.

    Raises SpecError that lists the labels.
    """
    labels = list(dict.fromkeys(cell.label for cell in experiment.cells))
    if label is None and len(labels) > 1:
        raise SpecError(
            f"{experiment.document.source}: this grid has {len(labels)} cells; choose one with --cell "
            f"({', '.join(labels)}), or run them all with `attnbench ablate`"
        )
    if label is not None and label not in labels:
        raise SpecError(f"--cell {label}: {unknown('cell', label, labels)}")
    cells = tuple(cell for cell in experiment.cells if label in (None, cell.label))
    return replace(experiment, cells=cells, part=True)
