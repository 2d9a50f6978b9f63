"""Specs as they were read: the mapping of a YAML text, what options laid over it, and where each part was given."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from attnbench.core.errors import SpecError
from attnbench.core.files import YamlPath, packaged_specs, parse_yaml
from attnbench.core.spec import Spec, location, spec_error, unknown
from attnbench.experiment.spec import CellSpec, ExperimentSpec, Header

Raw = dict[str, Any]
_AXES = "grid.axes."


@dataclass(frozen=True)
class Document:
    """A spec as read: its raw mapping with overrides applied, where each path was given, and the file it came from.

    lines: the line of `source`, or the option of the command line. axes: of the grid in the file itself.
    """

    raw: Raw
    lines: Mapping[YamlPath, int | str]
    source: str
    path: Path | None
    axes: tuple[str, ...] = ()

    def at(self, *path: str | int) -> str:
        """The location of a path, or of its nearest parent, for the front of a message."""
        while path and path not in self.lines:
            path = path[:-1]
        return location(self.source, self.lines.get(path))

    def laid_over(self, raw: Raw, path: YamlPath, origin: str | None) -> Document:
        """The same document with another mapping, whose node at `path` was given by `origin`."""
        lines = {at: line for at, line in self.lines.items() if at[: len(path)] != path}
        if origin is not None:
            mark(lines, path, origin)
        return replace(self, raw=raw, lines=lines)

    def with_axis(self, axis: str, values: list[Any], origin: str | None = None) -> Document:
        """The document with one axis of its grid added or replaced. Raises SpecError where its grid is no mapping."""
        raw = copy.deepcopy(self.raw)
        node = raw
        for name in ("grid", "axes"):
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
            if not isinstance(node, dict):
                raise SpecError(f"{self.at('grid', 'axes')}: {name}: this is a mapping, not {node!r}")
        self._forget_seeds(raw["grid"], node.get(axis), values)
        node[axis] = values
        return self.laid_over(raw, ("grid", "axes", axis), origin)

    @classmethod
    def forget_axes(cls, raw: Raw, axes: Any) -> None:
        """Drop from `raw` the seeds of entries that its grid has no more once `axes` take the place of its own."""
        grid = raw.get("grid")
        if isinstance(grid, dict) and isinstance(grid.get("axes"), Mapping) and isinstance(axes, Mapping):
            for path, values in grid["axes"].items():
                cls._forget_seeds(grid, values, axes.get(path, []))

    @staticmethod
    def _forget_seeds(grid: Raw, old: Any, new: Any) -> None:
        """Drop the seeds of entries that an axis no longer has."""
        more = grid.get("more_seeds")
        if isinstance(more, Mapping) and isinstance(old, list) and isinstance(new, list):
            gone = {str(label_of(value)) for value in old} - {str(label_of(value)) for value in new}
            grid["more_seeds"] = {label: seeds for label, seeds in more.items() if str(label) not in gone}


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Read a YAML file, or the packaged spec of that name, and apply `key.path=value` overrides (parsed as YAML).

    Raises SpecError when the file cannot be read, is no mapping, or an override is not of that form.
    """
    packaged = packaged_specs() / f"{path}.yaml"
    if not path.exists() and path.name == str(path) and packaged.is_file():
        path = packaged
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path}: there is no such file; `attnbench list specs` shows the packaged specs") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: this is a folder; name a YAML file in it") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line, at = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise SpecError(
            f"{path}:{line}: not UTF-8 at byte {at} of the line (0x{error.object[error.start]:02x}); convert the file "
            "(iconv -f LATIN1 -t UTF-8) or repair that line"
        ) from None
    raw, lines = parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise SpecError(f"{path}: a spec is a mapping with the keys {', '.join(ExperimentSpec.model_fields)}")
    grid = raw.get("grid")
    axes = grid.get("axes") if isinstance(grid, Mapping) else None
    document = Document(raw, lines, str(path), path, tuple(map(str, axes)) if isinstance(axes, Mapping) else ())
    for override in overrides:
        document = override_document(document, override)
    return document


def override_document(document: Document, override: str) -> Document:
    """The document with one `key.path=value` laid over it."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise SpecError(f"--set {override}: write it as key.path=value, like --set train.max_steps=500")
    origin = f"--set {override}"
    value, _ = parse_yaml(text, origin)
    name = name.strip()
    if name.startswith(_AXES):
        return document.with_axis(name.removeprefix(_AXES), value, origin)
    raw = copy.deepcopy(document.raw)
    if name == "grid.axes":
        document.forget_axes(raw, value)
    try:
        set_at(raw, name, value, merge=False)
    except ValueError as error:
        raise SpecError(f"{origin}: {error}") from None
    return document.laid_over(raw, tuple(name.split(".")), origin)


def set_at(raw: Raw, dotted: str, value: Any, *, merge: bool) -> None:
    """Set the node that `dotted` names; a mapping is merged into a mapping when `merge` is set, a bare name like one
    with that kind."""
    *parents, last = dotted.split(".")
    node: Any = raw
    for depth, name in enumerate(parents, 1):
        child = node.get(name)
        if child is None:
            child = node[name] = _left_out(parents[:depth], dotted.split(".")[depth])
        elif isinstance(child, str):
            child = node[name] = {"kind": child}  # a bare name is a mapping with that kind
        if not isinstance(child, dict):
            raise ValueError(f"'{name}' in '{dotted}' is {child!r}, not a mapping")
        node = child
    if not merge:
        node[last] = copy.deepcopy(value)
        return
    below = node.get(last)
    if below is None and isinstance(value, Mapping) and "kind" not in value:
        below = _left_out([*parents, last], *value)
    node[last] = _laid(below, value)


def _left_out(path: Sequence[str], *within: str) -> Raw:
    """What a section that the spec leaves out begins with: the kind that it has then, as a search is beam, if what is
    named within it belongs to that."""
    fields, default = CellSpec.model_fields, None
    for name in path:
        default = fields[name].get_default(call_default_factory=True) if name in fields else None
        if not isinstance(default, Spec):
            return {}
        fields = type(default).model_fields
    kind = getattr(default, "kind", None)
    return {} if kind is None or not set(within) <= set(fields) else {"kind": kind}


def _laid(below: Any, above: Any) -> Any:
    """What lies above, merged into what lies below where both are mappings of one kind."""
    if isinstance(below, Mapping) and isinstance(above, str) and above == below.get("kind"):
        return below
    if isinstance(below, str) and isinstance(above, Mapping):
        below = {"kind": below}  # a bare name is a mapping with that kind
    if not isinstance(below, Mapping) or not isinstance(above, Mapping) or above.get("kind") not in (
        None, below.get("kind"),
    ):  # fmt: skip
        return copy.deepcopy(above)
    result = copy.deepcopy(dict(below))
    for key, value in above.items():
        result[key] = _laid(result.get(key), value)
    return result


def header_of(document: Document) -> Header:
    """The name, grid and table of a document. Raises SpecError for faults in them, and for unknown keys beside them."""
    raw = document.raw
    known = list(ExperimentSpec.model_fields)
    for key in raw:
        if key not in known:
            raise SpecError(f"{document.at(key)}: {key}: {unknown('key', str(key), known)}")
    try:
        return Header.model_validate({key: value for key, value in raw.items() if key in Header.model_fields})
    except ValidationError as error:
        raise spec_error(error, document.source, document.lines) from None


def label_of(entry: Any) -> str | int | float | bool | None:
    """What an axis entry is called: by its `label`, or by what it holds."""
    if isinstance(entry, Mapping):
        return str(entry["label"]) if "label" in entry else "-".join(_words(entry))
    if isinstance(entry, list):
        return ",".join(map(str, entry))
    return "inf" if entry == float("inf") else entry


def speaks_for_itself(entry: Any) -> bool:
    """Whether the label of an axis entry says enough without the name of the axis: 8 and inf do not."""
    return isinstance(entry, Mapping) or (isinstance(entry, str) and entry != "inf")


def _words(value: Mapping[str, Any]) -> list[str]:
    words = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            words += _words(item)
        else:
            words.append(str(item) if key == "kind" or isinstance(item, str) else f"{key}-{item}")
    return words


def mark(lines: dict[YamlPath, int | str], path: YamlPath, where: int | str) -> None:
    """Note where `path` was given, and those of its parents that were not given before."""
    for length in range(1, len(path) + 1):
        lines.setdefault(path[:length], where)
