"""Registry: an open family of specs, found by `kind`, filled by importing every module of its package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from attnbench.core.spec import Spec, unknown

S = TypeVar("S", bound=Spec)
M = TypeVar("M", bound=Spec)


def discover(package: ModuleType) -> None:
    """Import each module of `package` whose name has no leading underscore, once."""
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package.__name__}.{module.name}")


class Registry(Generic[S]):
    """`kind` -> Spec class. Members register themselves; the package is imported when the family is first asked for.

    noun: what a member is called in messages ("transform"). base: the class every member extends.
    package: the dotted name of the package whose modules hold the members.
    """

    def __init__(self, noun: str, base: type[S], package: str) -> None:
        self.noun = noun
        self.base = base
        self.package = package
        self._members: dict[str, type[S]] = {}
        self._filled = False

    def register(self, cls: type[M]) -> type[M]:
        """Class decorator: adds `cls` under the default of its `kind` field. Raises ValueError if the kind is taken."""
        member: type[Any] = cls
        kind = member.model_fields["kind"].default
        if not isinstance(kind, str) or not issubclass(member, self.base):
            raise TypeError(f'{cls.__name__} must extend {self.base.__name__} with `kind: Literal["name"] = "name"`')
        taken = self._members.get(kind)
        if taken is not None and taken.__qualname__ != cls.__qualname__:
            raise ValueError(f"two {self.noun}s are called '{kind}': {taken.__qualname__} and {cls.__qualname__}")
        self._members[kind] = member
        return cls

    def _fill(self) -> None:
        if not self._filled:
            self._filled = True  # before, for members that ask for the family while they are imported
            try:
                discover(importlib.import_module(self.package))
            except BaseException:
                self._filled = False
                raise

    def kinds(self) -> list[str]:
        """Names of all members, sorted."""
        self._fill()
        return sorted(self._members)

    def get(self, kind: str) -> type[S]:
        """The class called `kind`. Raises ValueError that names the nearest one."""
        self._fill()
        if kind not in self._members:
            raise ValueError(unknown(self.noun, kind, self.kinds()))
        return self._members[kind]

    def parse(self, raw: str | Mapping[str, Any] | S) -> S:
        """A member from its bare name, a mapping with `kind`, or itself.

        Raises ValueError for an unknown kind, pydantic's ValidationError for bad fields.
        """
        if isinstance(raw, self.base):
            return raw
        article = "an" if self.noun[0] in "aeiou" else "a"
        if isinstance(raw, str):
            raw = {"kind": raw}
        if not isinstance(raw, Mapping):
            raise ValueError(f"{article} {self.noun} is a name or a mapping with 'kind', not {type(raw).__name__}")
        if "kind" not in raw:
            raise ValueError(f"{article} {self.noun} needs a 'kind' (known: {', '.join(self.kinds())})")
        try:
            cls = self.get(str(raw["kind"]))
        except ValueError as error:
            raise PydanticCustomError("unknown_key", "{message}", {"key": "kind", "message": str(error)}) from None
        return cls.model_validate(raw)


@dataclass(frozen=True)
class Family:
    """Marks a field as a member of an open family: `Annotated[TransformSpec, Family(lambda: transforms)]`.

    The member is dumped with its own fields, and the JSON schema lists the kinds known when it is made.
    """

    registry: Callable[[], Registry[Any]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda raw: self.registry().parse(raw),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.dump()),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        registry = self.registry()
        members = [handler(registry.get(kind).__pydantic_core_schema__) for kind in registry.kinds()]
        return {"anyOf": [{"enum": registry.kinds()}, *members]}
