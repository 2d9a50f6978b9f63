"""Score the weights of a cell again, with another search, another checkpoint or other text; the run stays as it is."""

from __future__ import annotations

import itertools
import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from pydantic import ValidationError

from attnbench.core import native
from attnbench.core.contention import relieved
from attnbench.core.errors import AttnbenchError, DataError, SpecError
from attnbench.core.files import cache_root, read_json, read_jsonl
from attnbench.core.processor import usable_cores
from attnbench.core.run_files import CELLS, CHECKPOINTS, GRID, LOG, RESULT, SPEC
from attnbench.core.spec import dotted, spec_error, unknown, unused_fields
from attnbench.data.corpus import Data
from attnbench.experiment.adopt import is_same_run
from attnbench.experiment.document import override_document, read_document
from attnbench.experiment.pipeline import IN_FLOAT32, Place, build_model, require_prepared, require_same_data, set_up
from attnbench.experiment.run import RUN_AGAIN, read_result
from attnbench.experiment.spec import CellSpec
from attnbench.metrics.bleu import corpus_bleu, corpus_chrf
from attnbench.search.base import Searcher
from attnbench.tasks.base import EVAL_TOKENS, Metrics, Task, TaskSpec
from attnbench.train.state import OtherModelError, checkpoint_steps, load_average, load_weights, weights_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A cell's model with the weights of `steps`, ready to decode."""

    spec: CellSpec
    task: Task
    data: Data
    model: Any
    steps: list[int]


def load_trained(
    folder: Path,
    overrides: Sequence[str] = (),
    cache: Path | None = None,
    *,
    device: str | None = None,
    step: int | None = None,
) -> Trained:
    """The model of a cell's folder, with `key.path=value` laid over its spec (search and scores may change).

    cache: where data are prepared; None: the usual place. step: one checkpoint; None: those that were evaluated, or as
    many of the last as an override of train.average says. Raises SpecError for what is no cell or does not fit its
    weights, DataError where the prepared data or the checkpoints are gone.
    """
    if not (folder / SPEC).is_file() or (folder / GRID).is_file():
        raise SpecError(f"{folder}: this is no cell; name a folder below runs/<name>/cells/{_cells(folder)}")
    averaged = next((each for each in overrides if _path(each) == "train.average"), None)
    if step is not None and averaged is not None:
        raise SpecError(f"--step {step} and --set {averaged} exclude each other: each chooses weights")
    document = read_document(folder / SPEC)
    for override in overrides:
        _require_effect(override)
        document = override_document(document, override)
    try:
        spec = CellSpec.model_validate(document.raw)
    except ValidationError as error:
        raise spec_error(error, document.source, document.lines) from None
    for override in overrides:
        _tell_what_changes_nothing(spec, override)
    options = [("--set", each) for each in overrides if _part(each) == "task"]
    written = shlex.join([str(folder / SPEC), *itertools.chain(*options)])
    root = cache or cache_root()
    try:
        at = require_prepared(spec, root, written)
        require_same_data(folder, at)
    except AttnbenchError as error:
        if not options or spec.task.data_path(root) == _task_of(folder).data_path(root):
            raise
        raise SpecError(
            f"{' '.join(itertools.chain(*options))}: names other data than the cell was trained with; to score another "
            "text, give --input and --reference"
        ) from error
    threads = min(torch.get_num_threads(), usable_cores())  # torch knows of no container's quota
    there = set_up(Place(root, device, threads), spec).device
    if there.type == "cpu" and (lacking := native.lacking()):
        log.warning("%s", lacking)
    model = build_model(spec).to(there)
    try:
        steps = _load(model, folder / CHECKPOINTS, spec, step, again=averaged)
    except OtherModelError:
        changed = [each for each in overrides if _part(each) in ("model", "task")]
        if not changed:
            raise
        said = " ".join(f"--set {each}" for each in changed)
        raise SpecError(f"{said}: makes another model than was trained; leave out what changes it") from None
    model.eval()
    return Trained(spec, spec.task.bind(), spec.task.open(at), model, steps)


def _require_effect(override: str) -> None:
    """Raise SpecError for what a trained cell no longer looks at: its training, and what its sites had in common."""
    path = _path(override)
    if path in ("seed", "train") or (path.startswith("train.") and path != "train.average"):
        raise SpecError(f"--set {override}: changes nothing, the cell is trained; leave it out")
    if _part(override) == "timing":
        raise SpecError(f"--set {override}: changes nothing, eval times no decoding; leave it out")
    if f"{path}.".startswith("model.attention.default."):
        site = path.replace("default", "cross", 1)
        raise SpecError(f"--set {override}: each site of a cell stands for itself; name the sites, like {site}=...")


def _tell_what_changes_nothing(spec: CellSpec, override: str) -> None:
    given = _path(override).split(".")
    for path, why in unused_fields(spec):
        if all(mine == theirs for mine, theirs in zip(given, path, strict=False)):  # the one lies within the other
            log.warning("--set %s: %s changes nothing: %s", override, dotted(path), why)


def _path(override: str) -> str:
    return override.partition("=")[0].strip()


def _part(override: str) -> str:
    """The part of the spec that a `key.path=value` changes."""
    return _path(override).split(".")[0]


def _cells(folder: Path) -> str:
    cells = sorted(path.name for path in (folder / CELLS).glob("*") if path.is_dir())
    return f" ({', '.join(cells[:8])})" if cells else ""


def _load(model: torch.nn.Module, checkpoints: Path, spec: CellSpec, step: int | None, again: str | None) -> list[int]:
    """again: the override by which weights are chosen anew, whatever a finished cell was scored with."""
    steps = checkpoint_steps(checkpoints)
    if not steps:
        raise DataError(f"{checkpoints}: there are no checkpoints; {_why_none(checkpoints.parent)}")
    if step is not None:
        if step not in steps:
            raise SpecError(f"--step {step}: {unknown('checkpoint', str(step), [str(each) for each in steps])}")
        load_weights(model, weights_path(checkpoints, step))
        return [step]
    scored = [] if again is not None else _evaluated(checkpoints.parent / RESULT)
    chosen = scored or steps[-spec.train.average :]
    if again is not None and spec.train.average > 1:
        chosen = _last_validated(checkpoints, spec.train.average) or chosen
        if not set(chosen) <= set(steps):  # a training keeps as many as its own spec averages, and the best one
            raise SpecError(f"--set {again}: of the last {spec.train.average} validations, steps "
                            f"{', '.join(map(str, chosen))}, not all have their checkpoint still (there are "
                            f"{', '.join(map(str, steps))})")  # fmt: skip
    if not set(chosen) <= set(steps):
        raise DataError(f"{checkpoints}: what was evaluated, {chosen}, is gone; choose a checkpoint with --step")
    if len(chosen) > 1:
        load_average(model, checkpoints, chosen)
        return chosen
    best = scored[0] if scored else _best(checkpoints, steps[-1])
    if best not in steps:
        raise DataError(f"{checkpoints}: the best checkpoint, step {best}, is gone; choose one with --step")
    load_weights(model, weights_path(checkpoints, best))
    return [best]


def _last_validated(checkpoints: Path, count: int) -> list[int]:
    """The steps of the last validations: each had a checkpoint once."""
    log = read_jsonl(checkpoints.parent / LOG)
    return sorted({line["step"] for line in log if "valid/loss" in line})[-count:]


def _why_none(cell: Path) -> str:
    result = cell / RESULT
    outcome = read_json(result, RUN_AGAIN).get("outcome", {}) if result.exists() else {}
    if outcome.get("kind") == "diverged":
        return f"the training {outcome['text']}; train it again at a lower rate, clipped, or in fp32"
    if outcome:
        if (trained := _trained_elsewhere(cell)) is not None:
            return f"the same run was trained for another table; name {shlex.quote(str(trained))}"
        return (
            "the result came from another table, or they were removed; name the cell that was trained, or run --fresh"
        )
    return "train the cell first"


def _trained_elsewhere(cell: Path) -> Path | None:
    """The cell of the same run in a table near by (names have one part or two) that still has its checkpoints."""
    cell, own = cell.absolute(), read_result(cell)
    content = own.get("data", {}).get("content_sha256")
    same = f"{CELLS}/*-{cell.name.rpartition('-')[-1]}/{CHECKPOINTS}"
    for near in cell.parents[2:4]:
        for found in sorted([*near.glob(f"*/{same}"), *near.glob(f"*/*/{same}")]):
            if found.parent == cell or not checkpoint_steps(found):
                continue
            if is_same_run(found.parent, own.get("digest", ""), content):
                return found.parent.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found.parent
    return None


def _evaluated(result: Path) -> list[int]:
    """The steps whose weights a finished cell was scored with; none while it is not finished."""
    return read_json(result, RUN_AGAIN).get("weights", []) if result.exists() else []


def _best(checkpoints: Path, newest: int) -> int:
    path = checkpoints / f"step-{newest}" / "state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return state["train"]["best_step"] or newest
    except FileNotFoundError:
        raise DataError(f"{path} is gone, which tells the best checkpoint; choose one with --step") from None
    except (EOFError, RuntimeError, KeyError, TypeError, UnpicklingError) as error:
        raise DataError(f"{path} is damaged ({error}); choose a checkpoint with --step, or train on") from None


def _searcher(trained: Trained) -> Searcher:
    search = trained.spec.search
    if search.precision_on(next(trained.model.parameters()).device) != search.precision:
        log.warning("searches %s", IN_FLOAT32)
    return search.build()


def score_split(trained: Trained, split: str) -> Metrics:
    """Decode and score one split. Raises DataError for a split that the data do not have."""
    searcher, task = _searcher(trained), trained.task
    data = task.adapt(trained.model, trained.data, 0, fresh=False)
    with torch.no_grad(), relieved(torch.get_num_threads()):
        return task.evaluate(trained.model, data, split, searcher, EVAL_TOKENS)


def translate(trained: Trained, lines: Sequence[str]) -> list[str]:
    """Translations of raw source lines, detokenised, in their order."""
    searcher = _searcher(trained)
    with torch.no_grad(), relieved(torch.get_num_threads()):
        return trained.task.translate(trained.model, trained.data, lines, searcher)


def _task_of(folder: Path) -> TaskSpec:
    return CellSpec.model_validate(read_document(folder / SPEC).raw).task


def score_translations(trained: Trained, lines: Sequence[str], references: Sequence[Sequence[str]]) -> Metrics:
    """sacrebleu's BLEU and chrF of what `translate` gave, lower-cased where the task's text is.

    references: of each of them a text with as many lines.
    """
    first, *more = references
    lower = trained.spec.task.lowercased
    scores = {
        "bleu_13a": corpus_bleu(lines, first, "13a_lc" if lower else "13a", more=more),
        "chrf": corpus_chrf(lines, first, lowercase=lower, more=more),
    }
    values = {name: score.value for name, score in scores.items()}
    return Metrics(values, {name: score.signature for name, score in scores.items()}, {"sentences": len(lines)}, {})
