"""What `attnbench list` knows: plain data about what a spec can name, and about specs."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.cli import common

if TYPE_CHECKING:
    from attnbench.core.registry import Registry

Entry = dict[str, Any]


def mechanisms() -> list[Entry]:
    """Those of attention, and the fertilities of recurrent models."""
    from attnbench.attention import mechanisms
    from attnbench.core.describe import parameters, summary
    from attnbench.models.fertility.base import fertilities

    known = [(each.kind, each.name, each.description, each.paper, each.parameters) for each in mechanisms()]
    for name in fertilities.kinds():
        spec = fertilities.get(name)
        known.append(("fertility", name, summary(spec), spec.paper, parameters(spec)))
    return [
        {
            "name": name,
            "kind": kind,
            "description": description,
            "paper": paper,
            "parameters": {key: each._asdict() for key, each in fields.items()},
        }
        for kind, name, description, paper, fields in known
    ]


def corpora() -> list[Entry]:
    from attnbench.core.describe import parameters
    from attnbench.data.datasets.base import datasets
    from attnbench.data.prepare import describe_datasets

    found = []
    for entry in describe_datasets():
        size = f"{entry['bytes'] / 1e6:,.1f} MB" if entry.get("bytes") else ""
        origin = entry.get("by_hand") or next(iter(entry.get("sources") or []), "")
        rest = {key: value for key, value in entry.items() if key != "title" and (key != "bytes" or value)}
        fields = {name: each._asdict() for name, each in parameters(datasets.get(entry["name"])).items()}
        found.append(
            {**rest, "description": entry.get("title", ""), "size": size, "from": origin, "parameters": fields}
        )
    return found


def models() -> list[Entry]:
    from attnbench.models.base import models as family

    return [_facts(family, name) for name in family.kinds()]


def searches() -> list[Entry]:
    """And the penalties of a beam."""
    from attnbench.search.base import searches as family
    from attnbench.search.coverage_penalty import coverage_penalties
    from attnbench.search.length_penalty import length_penalties

    return _of_each(family, length_penalties, coverage_penalties)


def training() -> list[Entry]:
    """Optimisers and schedules of the learning rate."""
    from attnbench.train.optim import optimizers, schedules

    return _of_each(optimizers, schedules)


def tokenizers() -> list[Entry]:
    from attnbench.data.tokenizers.base import tokenizers as family

    return _of_each(family)


def _of_each(*families: Registry[Any]) -> list[Entry]:
    named = ((family, name) for family in families for name in family.kinds())
    return [{"name": name, "kind": family.noun, **_facts(family, name)} for family, name in named]


def _facts(family: Registry[Any], name: str) -> Entry:
    from attnbench.core.describe import parameters, summary

    fields = {key: each._asdict() for key, each in parameters(family.get(name)).items()}
    return {"name": name, "description": summary(family.get(name)), "parameters": fields}


def specs() -> list[Entry]:
    """Packaged specs, and those below experiments/ of the working directory."""
    from attnbench.core.files import packaged_specs

    found = [(path.stem, path, "packaged") for path in sorted(packaged_specs().glob("*.yaml"))]
    here = Path("experiments")
    found += [
        (str(path), path, "experiments")
        for path in sorted(here.rglob("*.yaml"))
        if path.name != "reported.yaml" and "results" not in path.parts and not path.name.startswith(".")
    ]
    return [{"name": name, "where": where, "description": _comment(path)} for name, path, where in found]


def _comment(path: Path) -> str:
    """The first sentence of its comment, without directives to an editor."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    texts = (line.lstrip("# ").strip() for line in comment if "yaml-language-server" not in line)
    said = " ".join(itertools.takewhile(bool, itertools.dropwhile(operator.not_, texts)))
    return re.split(r"(?<=\.)\s", said, maxsplit=1)[0]


FAMILIES: dict[str, tuple[Callable[[], list[Entry]], tuple[str, ...]]] = {
    "mechanisms": (mechanisms, ("kind", "name", "parameters", "description", "paper")),
    "datasets": (corpora, ("name", "languages", "pairs", "size", "licence", "description", "from")),
    "models": (models, ("name", "parameters", "description")),
    "tokenizers": (tokenizers, ("name", "parameters", "description")),
    "training": (training, ("kind", "name", "parameters", "description")),
    "searches": (searches, ("kind", "name", "parameters", "description")),
    "specs": (specs, ("name", "description")),
}
"""Family -> its entries, and the columns of its list."""


def show_all(entries: list[Entry], columns: tuple[str, ...]) -> None:
    """A table of them on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table
    from rich.text import Text

    whole = (Column(column, overflow="fold") for column in columns)  # a name that is cut names nothing
    table = Table(*whole, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for entry in entries:
        table.add_row(*(Text(_short(entry.get(column))) for column in columns))
    out = common.console()
    if not out.is_terminal:
        out.width = 10_000  # a pipe has no width to keep to
    out.print(table, soft_wrap=False)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item:,}" if isinstance(item, int) else str(key) for key, item in value.items())
    return "-".join(map(str, value)) if isinstance(value, list | tuple) else str(value if value is not None else "")


def show_one(entry: Entry) -> None:
    """Everything about it on stdout, as YAML."""
    from attnbench.core.files import dump_yaml

    text = dump_yaml({key: value for key, value in entry.items() if value not in ("", None, {}, [])})
    common.console().print(text, end="", markup=False, soft_wrap=True)
