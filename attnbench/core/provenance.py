"""The source that members of families come from: what is kept by spec does not see code that changes."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from attnbench.core.spec import Spec


def member_files(*specs: Spec) -> dict[str, str]:
    """Module -> hash of its file, for each member of a family (`kind`) that these are made of. What that file calls, in
    others, is not seen."""
    _remember_loaded()
    found = {}
    for each in _specs(specs):
        with suppress(OSError, TypeError):  # a class of a notebook, which no file holds
            path = inspect.getsourcefile(type(each))
            if "kind" in type(each).model_fields and path is not None:
                found[type(each).__module__] = _hash(path)
    return dict(sorted(found.items()))


def changed_members(now: Mapping[str, str], noted: Mapping[str, str] | None) -> list[str]:
    """Modules whose file was another one when it was noted; of those that were not, as in older notes, nothing is
    known."""
    then = noted or {}
    return [name for name, hash in now.items() if then.get(name, hash) != hash]


def _specs(value: object) -> Iterator[Spec]:
    if isinstance(value, Spec):
        yield value
        for name, field in type(value).model_fields.items():
            if not field.exclude:  # what other fields were made of
                yield from _specs(getattr(value, name))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _specs(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _specs(each)


def _remember_loaded() -> None:
    """Hash what is loaded as it was loaded: a later cell may run it when somebody has edited the file."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.startswith("attnbench.") and path and path.endswith(".py"):
            with suppress(OSError):
                _hash(path)


@functools.cache
def _hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
