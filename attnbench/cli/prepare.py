"""`attnbench prepare`: download, read or generate a corpus, and make it ready for training."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from attnbench.cli import common


def prepare(
    what: Annotated[
        str | None,
        typer.Argument(help="Name of a corpus, or a YAML spec (./NAME, if a corpus is called so).", show_default=False),
    ] = None,
    source: common.From = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="path=value laid over the spec, or over the corpus and its recipe; repeatable."),
    ] = None,
    offline: common.Offline = False,
    listed: Annotated[bool, typer.Option("--list", help="List the corpora: size, licence, source.")] = False,
    as_json: common.Json = False,
) -> None:
    """Prepare a corpus by its usual recipe, or as a spec says, and print its folder. What is prepared already is left
    alone; --from with other files than a released corpus was prepared from is an error. Files of your own are looked
    for in the working directory, or in --from, and are prepared again where they have changed: texts of the same
    names take each other's place, unless ATTNBENCH_CACHE names another folder.

    Example: attnbench prepare multi30k-de-en --from ~/multi30k

    Example: attnbench prepare parallel --set languages=[de,en] --set train.source=a.de --set train.target=a.en
    --set tokenizer.vocab=8000
    """
    from attnbench.core.errors import SpecError

    if listed:
        if what is not None or overrides or source is not None or offline:
            raise SpecError("--list shows the corpora that are known, and prepares none; give it alone, or with --json")
        from attnbench.cli.list import show_datasets

        show_datasets(as_json=as_json)
        return
    if what is None:
        raise SpecError("name a corpus or a spec, like `attnbench prepare demo`; `attnbench prepare --list` shows all")
    from attnbench.experiment.preparation import prepare_named

    chosen = common.settings(common.RUNS, source=source, offline=offline)
    try:
        folders = prepare_named(what, overrides or [], chosen)
    except SpecError as error:
        if what == "parallel" and "required" in str(error):
            raise SpecError(f"{error}\nGive it like this: {_OWN_TEXT}") from None
        raise
    if as_json:
        common.emit_json({"prepared": folders})
        return
    log = logging.getLogger("attnbench")
    for folder in folders:
        log.info("pairs: %s", ", ".join(f"{split} {facts['pairs']:,}" for split, facts in folder["splits"].items()))
        common.console().print(folder["path"], markup=False)


_OWN_TEXT = (
    "attnbench prepare parallel --set languages=[de,en] --set train.source=FILE --set train.target=FILE; "
    "valid.source, valid.target, test.source and test.target too, or they are taken from the training text"
)
