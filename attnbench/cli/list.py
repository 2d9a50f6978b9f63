"""`attnbench list`: what there is to name in a spec."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from attnbench.cli import common


class Family(StrEnum):
    mechanisms = "mechanisms"
    datasets = "datasets"
    models = "models"
    tokenizers = "tokenizers"
    training = "training"
    searches = "searches"
    specs = "specs"


_ONE = {"training": "optimizer or schedule", "searches": "search or penalty"}
"""What one of a family is called, where that is not its name without an s."""


def list_(
    family: Annotated[Family, typer.Argument(help="What to list.", show_default=False)],
    name: Annotated[str | None, typer.Argument(help="One of them, in full.", show_default=False)] = None,
    as_json: common.Json = False,
) -> None:
    """List what a spec can name, or specs; with a name, everything about that one.

    Example: attnbench list mechanisms topk
    """
    from attnbench.cli.catalog import FAMILIES, show_all, show_one
    from attnbench.core.errors import SpecError
    from attnbench.core.spec import unknown

    entries, columns = FAMILIES[family.value]
    every = entries()
    chosen = every if name is None else [entry for entry in every if entry["name"] == name]
    if not chosen and name is not None:
        noun = _ONE.get(family.value, family.value.removesuffix("s"))
        raise SpecError(unknown(noun, name, [entry["name"] for entry in every]))
    if as_json:
        common.emit_json(chosen)
    elif name is None:
        show_all(chosen, columns)
    else:
        for entry in chosen:
            show_one(entry)


def show_datasets(*, as_json: bool) -> None:
    """The list of `attnbench prepare --list`."""
    list_(Family.datasets, None, as_json)
