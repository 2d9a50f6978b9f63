"""`attnbench prepare`: download, read or generate a corpus, and make it ready for training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnbench.cli import common


def prepare(
    what: Annotated[str | None, typer.Argument(help="Name of a corpus, or a YAML spec.", show_default=False)] = None,
    source: common.From = None,
    overrides: common.Overrides = None,
    offline: common.Offline = False,
    listed: Annotated[bool, typer.Option("--list", help="List the corpora: size, licence, source.")] = False,
    as_json: common.Json = False,
) -> None:
    """Prepare a corpus by its usual recipe, or as a spec says. What is prepared already is left alone.

    Example: attnbench prepare multi30k-de-en --from ~/multi30k

    Example: attnbench prepare parallel --set languages=[de,en] --set 'train={source: a.de, target: a.en}' ...
    """
    from attnbench.core.errors import SpecError

    if listed:
        from attnbench.cli.list import show_datasets

        show_datasets(as_json=as_json)
        return
    if what is None:
        raise SpecError("name a corpus or a spec, like `attnbench prepare demo`; `attnbench prepare --list` shows all")
    from attnbench.experiment.session import prepare_named

    folders = prepare_named(what, overrides or [], common.settings(Path("runs"), source=source, offline=offline))
    if as_json:
        common.emit_json({"prepared": folders})
    else:
        for folder in folders:
            common.console().print(folder["path"], markup=False)
