"""Which cells are done: here, beside the spec, in other tables; and whether of the data that are prepared now."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attnbench.core.errors import AttnbenchError
from attnbench.core.files import write_lines
from attnbench.core.provenance import changed_members, member_files
from attnbench.core.run_files import MECHANISMS, OUTPUTS, cell_folder
from attnbench.core.version import git_state
from attnbench.experiment.adopt import adopt, find_done, finished_in, is_same_run
from attnbench.experiment.grid import Cell, Experiment
from attnbench.experiment.pipeline import content_sha256
from attnbench.experiment.run import is_done, read_result
from attnbench.experiment.settings import Settings

log = logging.getLogger("attnbench")


Finished = Callable[[], Mapping[str, Sequence[Path]]]
"""Gives what `finished_in` found in other tables."""


def take_finished(root: Path, cell: Cell, finished: Finished, settings: Settings) -> bool:
    """Whether the cell is done, here or elsewhere; its result is then in its folder, with the corpus's text. finished:
    of `finished_elsewhere`.

    Raises AttnbenchError for a result that was made from other data than are prepared now.
    """
    if is_done(root, cell):
        if (other := of_other_data(root, cell, settings)) is not None:
            raise AttnbenchError(other)
        _restore_texts(root, cell, settings)
        return True
    origin = adopt(root, cell, finished(), content_of(cell, settings))
    if origin is not None:
        log.info("[%s, seed %d] taken from %s", cell.label, cell.seed, origin)
        if git_state()[1] or read_result(origin).get("dirty"):
            log.warning("[%s, seed %d] the code has changes that no commit holds, now or when that was made: it may "
                        "come out otherwise; --fresh trains anew", cell.label, cell.seed)  # fmt: skip
        _restore_texts(root, cell, settings)
    return origin is not None


def of_other_data(root: Path, cell: Cell, settings: Settings) -> str | None:
    """What a run stops with where a result was made from other data than are prepared now."""
    folder = cell_folder(root, cell.folder)
    made_from, present = read_result(folder).get("data", {}).get("content_sha256"), content_of(cell, settings)
    if not made_from or not present or made_from == present:
        return None
    return (
        f"{folder}: this result was made from other data than are prepared now; run with --fresh, or under another name"
    )


def _restore_texts(root: Path, cell: Cell, settings: Settings) -> None:
    """Put the corpus's own lines beside the outputs of a cell that came without them, where the data are prepared.

    No saved table holds them; paired tests and examples need them.
    """
    outputs = cell_folder(root, cell.folder) / OUTPUTS
    task = cell.spec.task.bind()
    splits = [path.stem for path in sorted(outputs.glob("*.txt")) if "." not in path.stem]
    absent = [split for split in splits if not all((outputs / f"{split}.{each}").exists() for each in task.kept_texts)]
    if not absent or not is_prepared(cell, settings):
        return
    try:
        data = cell.spec.task.open(cell.spec.task.data_path(settings.cache))
        for split in absent:
            for ending, lines in task.texts(data, split).items():
                write_lines(outputs / f"{split}.{ending}", lines)
    except (AttnbenchError, OSError) as error:  # the cell is done all the same
        log.warning("%s: the corpus's text could not be put beside the outputs (%s)", outputs, error)


def finished_elsewhere(experiment: Experiment, settings: Settings) -> Finished:
    """The finished cells of other tables: committed beside the spec, those of this very table first, or among the runs.

    Every folder of every run is looked at for it: once, when it is first called. One that is finished after that is
    trained here all the same, as each has been looked for before the first is trained; in the table's own folder, other
    processes' cells are seen whenever they are done (executor.attempt).
    """
    path = experiment.document.path
    committed = [] if path is None else [path.parent / "results"]
    own = [place / experiment.name.rpartition("/")[2] for place in committed]  # another's may be of another version
    places = [*own, *committed, settings.runs]
    return functools.cache(lambda: finished_in(place for place in places if place.is_dir()))


def warn_of_results_not_taken(root: Path, cells: Iterable[Cell], finished: Finished, settings: Settings) -> None:
    """Say which cells that will be trained are done elsewhere, of other data: of an older way to prepare them, say."""
    others = []
    for cell in {cell.digest: cell for cell in cells}.values():
        content = content_of(cell, settings)
        found = None if content is None or is_done(root, cell) else find_done(root, cell, finished())
        if found is not None and not is_same_run(found, cell.digest, content):
            others.append(found)
    if others:
        log.warning("done elsewhere, but of other data than are prepared now, and so not taken: %d of the cells, the "
                    "first in %s", len(others), others[0])  # fmt: skip


def warn_of_changed_code(results: Iterable[tuple[Cell, Path]]) -> None:
    """Say which results, each in its folder, were made with other code of their mechanisms than is here now."""
    others: dict[str, int] = {}
    for cell, folder in results:
        now = member_files(cell.spec.model, cell.spec.train, cell.spec.search)
        for name in changed_members(now, read_result(folder).get(MECHANISMS)):
            others[name] = others.get(name, 0) + 1
    for name, count in others.items():
        log.warning(
            "%s has changed since %d of the cells that are done %s made: they may come out otherwise; --fresh trains "
            "them anew", name, count, "was" if count == 1 else "were",
        )  # fmt: skip


def damaged_results(root: Path, cells: Iterable[Cell]) -> dict[str, str]:
    """The folders of cells with a result that cannot be read: what mends each."""
    found = {}
    for cell in cells:
        if is_done(root, cell):
            try:
                read_result(cell_folder(root, cell.folder), cell.digest)
            except AttnbenchError as error:
                found[cell.folder] = str(error)
    return found


def may_have_changed(cell: Cell, settings: Settings) -> bool:
    """Whether the data are looked at before results are taken for theirs: a spec names own files, not their text."""
    own = cell.spec.task.own_files(settings.source)
    return is_prepared(cell, settings) or (bool(own) and all(path.exists() for path in own))


def is_prepared(cell: Cell, settings: Settings) -> bool:
    """Whether the cell's data are there."""
    return cell.spec.task.prepared(settings.cache) is not None


def content_of(cell: Cell, settings: Settings) -> str | None:
    """The hash of the cell's prepared data; None while they are not prepared."""
    data = cell.spec.task.prepared(settings.cache)
    return None if data is None else content_sha256(data)
