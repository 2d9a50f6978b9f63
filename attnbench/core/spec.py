"""Spec: the frozen, strict base of everything a YAML file can say, and the errors it gives."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from attnbench.core.errors import SpecError
from attnbench.core.files import YamlPath


class Spec(BaseModel):
    """Frozen and strict: an unknown key or a wrong type is an error, never a default.

    Members of an open family (transforms, models, ...) tag themselves with `kind: Literal["name"] = "name"`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            known = list(cls.model_fields)
            for key in raw:
                if key not in known:
                    raise PydanticCustomError(
                        "unknown_key", "{message}", {"key": str(key), "message": unknown("key", str(key), known)}
                    )
        return raw

    @classmethod
    def __pydantic_init_subclass__(cls, **given: Any) -> None:
        super().__pydantic_init_subclass__(**given)
        for base in cls.__mro__[1:]:
            for name in cls.model_fields.keys() & base.__dict__.keys():
                if isinstance(base.__dict__[name], property):  # which would be read in the field's place
                    raise TypeError(f"{cls.__name__}.{name}: {base.__name__} tells something by this name; call the "
                                    "field otherwise")  # fmt: skip

    def dump(self) -> dict[str, Any]:
        """Plain YAML-ready mapping of every field; parsing it gives an equal spec."""
        return self.model_dump(mode="json")

    def canonical(self) -> dict[str, Any]:
        """`kind` and every field that differs from its default.

        A field added later with a default that keeps the old behaviour leaves old digests, and so old results, valid.
        """
        content = {}
        for name in type(self).model_fields:
            if name == "kind" or self.is_set(name):
                content[name] = _canonical(getattr(self, name))
        return content

    def digest(self) -> str:
        """12 hex digits; equal specs have equal digests, different ones differ."""
        text = json.dumps(self.canonical(), sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def is_set(self, name: str) -> bool:
        """Whether a field differs from its default; resolved specs spell out every field."""
        field = type(self).model_fields[name]
        return field.is_required() or getattr(self, name) != field.get_default(call_default_factory=True)

    def unused(self) -> Iterator[tuple[str, str]]:
        """Fields that are set and change nothing as the others stand: dotted path below this spec, and why.

        They are told before a run and not refused: a sweep may well come by such a place.
        """
        return iter(())

    def replace(self, **changes: Any) -> Self:
        """The same spec with some fields changed, validated again."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate({**values, **changes})


def unused_fields(spec: Spec, at: YamlPath = ()) -> Iterator[tuple[YamlPath, str]]:
    """What a spec, and those within it, tell by `unused`: path and why."""
    for path, why in spec.unused():
        yield (*at, *path.split(".")), why
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, Spec):
            yield from unused_fields(value, (*at, name))


def _canonical(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.canonical()
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)  # `lr: 1` and `lr: 1.0` are one spec
    return str(value) if isinstance(value, Path) else value


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The dotted paths at which two dumped specs part. A key that only one has is a field that its version knew."""
    found = []
    for key in first.keys() & second.keys():
        ours, theirs = first[key], second[key]
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping) and ours.get("kind") == theirs.get("kind"):
            found += [f"{key}.{path}" for path in differing(ours, theirs)]
        elif ours != theirs:
            found.append(str(key))
    return sorted(found)


def unknown(noun: str, name: str, known: Sequence[str]) -> str:
    """The message for a name that is not among the known ones: the nearest, then all."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"unknown {noun} '{name}'{hint} (known: {', '.join(known) or 'none'})"


def problems(error: ValidationError, at: YamlPath = ()) -> list[tuple[YamlPath, str]]:
    """(path, message) of each fault, with the faults of nested families at their own paths."""
    found: list[tuple[YamlPath, str]] = []
    for item in error.errors():
        loc = (*at, *item["loc"])
        context = item.get("ctx") or {}
        cause = context.get("error")
        if isinstance(cause, ValidationError):
            found += problems(cause, loc)
        elif item["type"] == "unknown_key":
            found.append(((*loc, context["key"]), context["message"]))
        elif item["type"] == "missing":
            found.append((loc, "this key is required and absent"))
        elif item["type"] == "literal_error" and isinstance(item.get("input"), str):
            found.append((loc, unknown("choice", item["input"], re.findall(r"'([^']*)'", context["expected"]))))
        elif isinstance(cause, Exception):
            found.append((loc, str(cause)))
        else:
            given, said = item.get("input"), item["msg"][:1].lower() + item["msg"][1:]
            if item["type"] == "model_type":
                said = "this is a mapping of several keys, as {key: value}"
            shown = f" (given: {given!r})" if isinstance(given, (str, int, float, bool, type(None))) else ""
            found.append((loc, said + shown))
    return found


def location(name: str, line: int | str | None) -> str:
    """Where a path was given, for the front of a message."""
    if line is None:
        return name
    return f"{name}:{line}" if isinstance(line, int) else line


def dotted(path: YamlPath) -> str:
    """("grid", "seeds", 0) -> grid.seeds.0"""
    return ".".join(str(part) for part in path)


def spec_error(error: ValidationError, name: str, lines: Mapping[YamlPath, int | str]) -> SpecError:
    """A SpecError that gives the place and YAML path of each fault.

    lines: the line of `name` on which a path begins, or the place itself where the path was not given there.
    """
    rows = []
    for path, message in _united(problems(error), lines):
        kept = path
        while kept and kept not in lines:  # a path that the file does not spell out: its nearest parent
            kept = kept[:-1]
        where = location(name, lines.get(kept))
        row = f"{where}: {dotted(path)}: {message}" if path else f"{where}: {message}"
        row += _laid_over(kept, lines)
        if row not in rows:
            rows.append(row)
    return SpecError("\n".join(rows))


def _laid_over(path: YamlPath, lines: Mapping[YamlPath, int | str]) -> str:
    """The options of the command line that changed something below `path`: a fault of the whole may be theirs."""
    below = (where for at, where in lines.items() if len(at) > len(path) and at[: len(path)] == path)
    options = dict.fromkeys(where for where in below if isinstance(where, str) and where.startswith("--"))
    return f" (as changed by {', '.join(options)})" if path and options else ""


_BRANCH = re.compile(r"str|int|float|bool|none|(list|dict|tuple|set|literal|constrained|function|is-instance)\b.*")
"""What pydantic calls a branch of a union in the path of a fault."""


def _united(faults: Sequence[tuple[YamlPath, str]], lines: Mapping[YamlPath, int | str]) -> list[tuple[YamlPath, str]]:
    """The faults, those of a union's branches reduced: to the branch that fits best, else to one that says all."""
    found: dict[YamlPath, list[str]] = {}
    unions: set[YamlPath] = set()
    for path, message in faults:
        told: YamlPath = ()
        for part in path:
            if isinstance(part, str) and _BRANCH.fullmatch(part) and (*told, part) not in lines:
                unions.add(told)
            else:
                told = (*told, part)
        found.setdefault(told, []).append(message)
    united = []
    for path, messages in found.items():
        if path not in unions:
            united += [(path, message) for message in messages]
        elif not any(other[: len(path)] == path for other in found if other != path):
            united.append((path, ", or ".join(messages)))
    return united
