"""The source that a cell's mechanisms come from: results are kept by spec, which does not see code that changes."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attnbench.core.spec import Spec
from attnbench.experiment.spec import CellSpec


def mechanism_files(spec: CellSpec) -> dict[str, str]:
    """Module -> hash of its file, for each member of a family (`kind`) that the model and the search are made of."""
    found = {}
    for each in (*_specs(spec.model), *_specs(spec.search)):
        path = inspect.getsourcefile(type(each))
        if "kind" in type(each).model_fields and path is not None and Path(path).is_file():
            found[type(each).__module__] = _hash(path)
    return dict(sorted(found.items()))


def changed_mechanisms(spec: CellSpec, result: Mapping[str, Any]) -> list[str]:
    """Modules whose file was another one when the result was made; older results do not say."""
    made_by = result.get("mechanisms") or {}
    return [name for name, now in mechanism_files(spec).items() if made_by.get(name, now) != now]


def _specs(value: object) -> Iterator[Spec]:
    if isinstance(value, Spec):
        yield value
        for name in type(value).model_fields:
            yield from _specs(getattr(value, name))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _specs(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _specs(each)


@functools.cache
def _hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
