"""Registry: an open family of specs, found by `kind`, filled by importing every module of its package."""

from __future__ import annotations

import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from attnbench.core.errors import AttnbenchError
from attnbench.core.spec import Spec, unknown

S = TypeVar("S", bound=Spec)
M = TypeVar("M", bound=Spec)


class MemberError(AttnbenchError):
    """A member of a family is not what it has to be. Exit code 1."""


def discover(package: ModuleType) -> None:
    """Import each module of `package` whose name has no leading underscore, once.

    Raises MemberError, with file and line, for one that cannot be imported.
    """
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            name = f"{package.__name__}.{module.name}"
            try:
                importlib.import_module(name)
            except MemberError:  # of another family that it asked for, or whose kind is taken
                raise
            except Exception as error:
                raise MemberError(f"{_place(error, name)}: {type(error).__name__}: {error}; mend that file or what it "
                                  "imports, or remove it") from error  # fmt: skip


def _place(error: Exception, module: str) -> str:
    """Where a module fails: the last line of its package's code that was being run, or that cannot be read."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    family = f"/{module.rsplit('.', 1)[0].replace('.', '/')}/"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if family in Path(each.filename).as_posix()]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else module


def unwritten(member: object, method: str) -> MemberError:
    """To be raised where a member of a family, or its class, lacks what every one has to have."""
    cls = member if isinstance(member, type) else type(member)
    return MemberError(f"{_called(cls)} has no `{method}`, which every {_base_of(cls, method)} needs")


def _base_of(cls: type[Any], method: str) -> str:
    """The public class that has the method without saying what it does."""
    able = (each.__name__ for each in cls.__mro__ if method in vars(each))
    return next((name for name in able if not name.startswith("_")), cls.__name__)


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
        """Class decorator: adds `cls` under the default of its `kind` field.

        Raises TypeError for a class that is none of this family, MemberError if its kind is taken.
        """
        member: type[Any] = cls
        belongs = issubclass(cls, self.base)
        field = member.model_fields.get("kind") if belongs else None
        kind = None if field is None else field.default
        if field is None or not isinstance(kind, str) or get_args(field.annotation) != (kind,):
            raise TypeError(f'{cls.__name__} must extend {self.base.__name__} with `kind: Literal["name"] = "name"`')
        taken = self._members.get(kind)
        if taken is not None and _called(taken) != _called(cls):
            raise MemberError(f"two {self.noun}s are called '{kind}': {_called(taken)} and {_called(cls)}; rename one")
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
        """The class called `kind`. Raises ValueError that names the nearest one, or one that was not registered."""
        self._fill()
        if kind not in self._members:
            for cls in _descendants(self.base):
                if (field := cls.model_fields.get("kind")) is not None and field.default == kind:
                    raise ValueError(f"the {self.noun} '{kind}' is not registered: {_called(cls)} lacks the decorator")
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
        self._fill()  # where a file that cannot be imported is no fault of what is read
        try:
            cls = self.get(str(raw["kind"]))
        except ValueError as error:
            raise PydanticCustomError("unknown_key", "{message}", {"key": "kind", "message": str(error)}) from None
        return cls.model_validate(raw)


def _descendants(cls: type[M]) -> Iterator[type[M]]:
    for each in cls.__subclasses__():
        yield each
        yield from _descendants(each)


def _called(cls: type[Any]) -> str:
    """A module that is loaded anew, as in a notebook, may register its classes again."""
    return f"{cls.__module__}.{cls.__qualname__}"


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
