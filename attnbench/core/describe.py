"""The fields of a spec, as lists for people show them."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, NamedTuple

from pydantic.fields import FieldInfo

from attnbench.core.registry import Family
from attnbench.core.spec import Spec


class Parameter(NamedTuple):
    """One field of a spec. default is None where the field is required, too."""

    type: str
    default: Any
    description: str
    required: bool = False


def parameters(cls: type[Spec]) -> dict[str, Parameter]:
    """Every field but `kind`, by its name in YAML."""
    return {
        name: Parameter(
            _field_type(field), None if field.is_required() else _plain(field), field.description or "",
            field.is_required(),
        )
        for name, field in cls.model_fields.items()
        if name != "kind"
    }  # fmt: skip


def summary(cls: type[Spec]) -> str:
    """The first line of its docstring."""
    return (cls.__doc__ or "").strip().split("\n")[0]


def _plain(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    return default.dump() if isinstance(default, Spec) else default


def _field_type(field: FieldInfo) -> str:
    """A member of a family is called what the family calls it: `transform`."""
    family = next((mark for mark in field.metadata if isinstance(mark, Family)), None)
    return _type_name(field.annotation) if family is None else family.registry().noun


def _type_name(annotation: Any) -> str:
    """The type as a YAML writer would say it: `int | null`, `threshold | index`."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(part) for part in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if annotation in (None, types.NoneType):
        return "null"
    if arguments:
        return f"{getattr(origin, '__name__', origin)} of {', '.join(_type_name(part) for part in arguments)}"
    return getattr(annotation, "__name__", str(annotation))
