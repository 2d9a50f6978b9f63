"""Data made ready for cells, by a spec or by the name of a corpus."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnbench.data.datasets.base import datasets
from attnbench.data.prepare import read_manifest
from attnbench.experiment.document import Document, override_document, read_document
from attnbench.experiment.grid import Cell, expand
from attnbench.experiment.settings import Settings
from attnbench.tasks.translation import TranslationSpec

log = logging.getLogger("attnbench")


def prepare_data(cells: Sequence[Cell], settings: Settings) -> None:
    """Prepare the data of every cell once. Raises DataError where they cannot be had."""
    ready: set[Path] = set()
    for cell in cells:
        at = cell.spec.task.data_path(settings.cache)
        if at not in ready:
            cell.spec.task.prepare(settings.cache, settings.source, settings.offline)
            ready.add(at)


def prepare_named(what: str, overrides: Sequence[str], settings: Settings) -> list[dict[str, Any]]:
    """Prepare a corpus by its name, or every corpus a spec's cells use; returns folder and counts of each.

    A corpus comes before a file of its name, which `./NAME` is. Raises SpecError for an unknown name or a bad spec,
    DataError where the data cannot be had.
    """
    known = what in datasets.kinds()
    if known and Path(what).is_file():
        log.warning("%s: this is the corpus of that name; write ./%s for the file in the working directory", what, what)
    if not known and (what.endswith((".yaml", ".yml")) or Path(what).is_file()):
        document = read_document(Path(what), overrides)
        # the spec of a cell has no name, since its table has
        cells = expand(replace(document, raw={"name": "prepare", **document.raw})).cells
    else:
        model = {"kind": "transformer", "tie": "decoder"}  # unused, and fit for any vocabularies
        raw = {"name": "prepare", "task": {"kind": "translation", "dataset": {"kind": what}}, "model": model}
        document = Document(raw, {}, f"prepare {what}", None)
        for override in overrides:
            override = override.removeprefix("task.")
            name = override.partition("=")[0].split(".")[0]
            inner = "task." if name in TranslationSpec.model_fields else "task.dataset."
            document = override_document(document, inner + override)
        cells = expand(document).cells
    prepare_data(cells, settings)
    folders = dict.fromkeys(cell.spec.task.data_path(settings.cache) for cell in cells)
    return [{"path": str(folder), "splits": read_manifest(folder)["splits"]} for folder in folders]
