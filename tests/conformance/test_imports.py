"""What has a leading underscore, module or name, is of its package alone: no other imports it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnbench

ROOT = Path(attnbench.__file__).parent


def imported(text: str) -> Iterator[str]:
    """The full name of each module and name of attnbench that is imported."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("attnbench."))
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports have full names"
            if node.module is not None and node.module.partition(".")[0] == "attnbench":
                yield from (f"{node.module}.{each.name}" for each in node.names)


def owner(name: str) -> str | None:
    """The package whose own the first underscored part of a name is; None without one."""
    parts = name.split(".")
    private = [at for at, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
    if not private:
        return None
    holder = parts[: private[0]]
    is_package = ROOT.parent.joinpath(*holder).is_dir()
    return ".".join(holder if is_package else holder[:-1])


def of_others(text: str, package: str) -> list[str]:
    return [name for name in imported(text) if owner(name) not in (None, package)]


def test_nothing_private_of_another_package_is_imported():
    found = {}
    for path in ROOT.rglob("*.py"):
        package = ".".join(path.relative_to(ROOT.parent).parent.parts)
        if names := of_others(path.read_text(encoding="utf-8"), package):
            found[str(path)] = names
    assert not found


@pytest.mark.parametrize(("text", "found"), [
    ("from attnbench.core import _x", []),
    ("from attnbench.core._x import y", []),
    ("from attnbench.core.files import _x, __y__", []),
    ("from torch import _C", []),
    ("from attnbench.attention.transforms import _x, y", ["attnbench.attention.transforms._x"]),
    ("from attnbench.attention._x import y", ["attnbench.attention._x.y"]),
    ("def f():\n    import attnbench.attention._x", ["attnbench.attention._x"]),
    ("from attnbench.attention.types import _x", ["attnbench.attention.types._x"]),
    ("from attnbench import _x", ["attnbench._x"]),
])  # fmt: skip
def test_what_is_private_of_others(text: str, found: list[str]):
    assert of_others(text, "attnbench.core") == found
