"""One cell from its spec to its result: data, model, training, the chosen weights, search, scores."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from attnbench.attention.backends.base import chosen
from attnbench.core.contention import relieved
from attnbench.core.errors import AttnbenchError, DataError
from attnbench.core.files import read_json, read_jsonl, write_json
from attnbench.core.provenance import changed_members, member_files
from attnbench.core.run_files import CHECKPOINTS, LOG, MECHANISMS, REFERENCES
from attnbench.core.seeding import derive, seed_everything
from attnbench.data.prepare import read_manifest
from attnbench.experiment.environment import changed_arithmetic, environment
from attnbench.experiment.grid import Cell
from attnbench.experiment.run import RUN_AGAIN, Run
from attnbench.experiment.spec import CellSpec
from attnbench.experiment.timing import time_decoding
from attnbench.search.greedy import GreedySpec
from attnbench.tasks.base import EVAL_TOKENS, Metrics, Task
from attnbench.train.loop import TrainingOutcome, train
from attnbench.train.onednn import keep_few_products, use_onednn_float32
from attnbench.train.runtime import (
    Runtime,
    choose_device,
    choose_runtime,
    keep_freed_memory,
    use_device,
    use_no_tf32,
    use_threads,
)
from attnbench.train.spec import TrainSpec
from attnbench.train.state import TrainState, checkpoint_steps, load_average, load_weights, weights_path

IN_FLOAT32 = "in float32 in place of bfloat16, for which this device has no instructions"


@dataclass(frozen=True)
class Place:
    """Where and with what a cell runs. seeds and specs are the cell's own business. jobs: cells that run at a time."""

    cache: Path
    device: str | None = None
    threads: int = 1
    jobs: int = 1


Listener = Callable[[Mapping[str, Any]], None]


class Teller:
    """A run that also tells a listener every line of its log."""

    def __init__(self, run: Run, listen: Listener) -> None:
        self.checkpoints = run.checkpoints
        self._run = run
        self._listen = listen

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log(record)
        self._listen(record)

    def rewind(self, step: int) -> None:
        self._run.rewind(step)


def build_model(spec: CellSpec) -> torch.nn.Module:
    """The cell's model with the weights that its seed gives."""
    seed_everything(derive(spec.seed, "model"))
    return spec.model.build(spec.task.model_sizes())


def count_parameters(spec: CellSpec) -> int:
    """Parameters that the cell trains, shared ones once; no memory is taken."""
    with torch.device("meta"):
        model = spec.model.build(spec.task.model_sizes())
    return _size(model)


def _size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def require_prepared(spec: CellSpec, cache: Path, written: str = "on the spec") -> Path:
    """The folder of the cell's prepared data. Raises DataError where they are not prepared; written: where the spec
    stands."""
    found = spec.task.prepared(cache)
    if found is None:
        raise DataError(f"{spec.task.data_path(cache)}: the data are not prepared; run attnbench prepare {written}")
    return found


def set_up(place: Place, spec: CellSpec) -> Runtime:
    """What every training and evaluation of this process has: its device, threads, memory, and what multiplies."""
    device = use_device(choose_device(place.device))
    use_threads(place.threads)
    keep_freed_memory()
    keep_few_products()
    use_onednn_float32()
    use_no_tf32()
    return choose_runtime(device, spec.train.precision)


def run_cell(cell: Cell, run: Run, place: Place, listen: Listener) -> dict[str, Any]:
    """Train (or go on training) the cell, evaluate it, and write its result; returns the result.

    A training that diverged is scored from its best checkpoint; with none before it, the result has no scores.
    Raises DataError when the prepared data are absent.
    """
    started = time.perf_counter()
    spec = cell.spec
    runtime = set_up(place, spec)
    device = runtime.device
    if runtime.precision != spec.train.precision:
        listen({"event": f"products {IN_FLOAT32}"})
    searched = spec.search.precision_on(device)
    if searched != spec.search.precision:
        listen({"event": f"searches {IN_FLOAT32}"})
    at = require_prepared(spec, place.cache)
    data, task = spec.task.open(at), spec.task.bind()
    require_same_data(run.folder, at)
    mechanisms = member_files(spec.model, spec.train)
    for name in changed_members(mechanisms, note_start(run.folder, at, mechanisms).get(MECHANISMS)):
        listen({"event": f"{name} has changed since this training began, and goes on in it; --fresh begins anew"})
    model = build_model(spec).to(device)
    task.check(model, data)
    done = checkpoint_steps(run.checkpoints)
    data = task.adapt(model, data, derive(spec.seed, "adapt"), fresh=not done)
    made_with = {**environment(runtime), "search_precision": searched, "jobs": place.jobs}
    attempts = run.environment(made_with, done[-1] if done else 0)
    if done:
        listen({"event": f"goes on from step {done[-1]}"})
    others = dict.fromkeys(each for before in attempts[:-1] for each in changed_arithmetic(before, attempts[-1]))
    if others:
        listen(
            {"event": f"from step {done[-1]} on last digits are others than they would have been: {'; '.join(others)}"}
        )
    seed_everything(derive(spec.seed, "train"))
    runtime.forget_peak()
    validator = GreedySpec().build() if spec.train.validate_bleu else None
    width = spec.model.state_width or 1  # where there is none no schedule reads it
    steps: list[int] = []
    parts: dict[str, Metrics] = {}
    with relieved(place.threads, lambda told: listen({"event": told})) as cores:
        outcome = train(
            task, model, data, spec.train,
            seed=spec.seed, width=width, recorder=Teller(run, listen), runtime=runtime, validator=validator,
            shared=lambda: cores.seconds or 0.0,
        )  # fmt: skip
        if outcome.scorable:
            steps = choose_weights(model, run.checkpoints, outcome, spec.train)
            listen({"event": f"{outcome.ending.text}; evaluating {_weights_name(steps)}"})
            model.eval()
            parts = evaluate(task, model, data, spec, run)
            if spec.timing is not None:
                searcher = spec.search.build()
                parts["decode"] = time_decoding(task, model, data, spec.timing, searcher, runtime, EVAL_TOKENS)
        else:
            mend = "lower the learning rate, clip, or use fp32"
            listen({"event": f"{outcome.ending.text}; no checkpoint lies before it, so there are no scores; {mend}"})
    require_same_data(run.folder, at)  # they may have been prepared anew meanwhile, and be others
    result = _result(cell, outcome, parts, run, at, steps)
    result |= {"commit": attempts[-1]["commit"], "dirty": any(attempt["dirty"] for attempt in attempts)}
    result[MECHANISMS] = {**trained_with(run.folder), **member_files(spec.search)}
    result["backends"] = chosen(model)
    result["metrics"]["params"] = _size(model)
    borrowed = run.borrowed_seconds
    earlier = 0.0 if borrowed else outcome.resumed_shared  # what is borrowed counts in neither
    result["shared_seconds"] = cores.seconds if not earlier else (cores.seconds or 0.0) + earlier
    result["total_seconds"] = time.perf_counter() - started + outcome.resumed_seconds - borrowed
    run.finish(result)
    return result


def choose_weights(model: torch.nn.Module, checkpoints: Path, outcome: TrainingOutcome, spec: TrainSpec) -> list[int]:
    """Load the weights to evaluate: the mean of the last n validations, or the best one's. Returns their steps."""
    steps = checkpoint_steps(checkpoints)
    if spec.average > 1 and not outcome.diverged:
        chosen = steps[-spec.average :]
        load_average(model, checkpoints, chosen)
        return chosen
    best = outcome.state.best_step
    if not best:
        raise AttnbenchError(f"{checkpoints}: no validation gave a number to choose weights by")
    if best not in steps:
        raise AttnbenchError(f"{checkpoints}: the best checkpoint, step {best}, is gone; run the cell with --fresh")
    load_weights(model, weights_path(checkpoints, best))
    return [best]


def _weights_name(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"the mean of {len(steps)} checkpoints up to step {steps[-1]}"


def evaluate(task: Task, model: torch.nn.Module, data: Any, spec: CellSpec, run: Run) -> dict[str, Metrics]:
    """Scores of both held-out splits, and under `attention` what it did on the validation split. Always float32, but
    for searches, whose numbers are those of their spec."""
    searcher = spec.search.build()
    parts: dict[str, Metrics] = {}
    for split in ("valid", "test"):
        parts[split] = task.evaluate(model, data, split, searcher, EVAL_TOKENS)
        for ending, lines in parts[split].outputs.items():
            run.output(f"{split}.{ending}", lines)
    with torch.no_grad():
        parts["valid"].values.update(task.validate(model, data, "valid", EVAL_TOKENS))
    parts["attention"] = task.inspect(model, data, "valid", EVAL_TOKENS)
    return parts


def _result(
    cell: Cell, outcome: TrainingOutcome, parts: Mapping[str, Metrics], run: Run, data: Path, steps: list[int]
) -> dict[str, Any]:
    metrics: dict[str, float] = {}
    signatures: dict[str, str] = {}
    samples: dict[str, int] = {}
    references: dict[str, str] = {}
    for split, part in parts.items():
        if REFERENCES in part.outputs:
            references[split] = hashlib.sha256("\n".join(part.outputs[REFERENCES]).encode()).hexdigest()
        prefix = "" if split == "attention" else f"{split}/"
        metrics |= {prefix + name: value for name, value in part.values.items() if math.isfinite(value)}
        signatures |= {prefix + name: text for name, text in part.signatures.items()}
        samples |= {split if name == "sentences" else prefix + name: count for name, count in part.samples.items()}
    state = outcome.state
    if "test/decode_tokens_per_s" in metrics:
        metrics["decode/tokens_per_s"] = metrics.pop("test/decode_tokens_per_s")
    log = read_jsonl(run.folder / LOG)
    metrics |= {
        "train/steps": state.step,
        "train/tokens": state.tokens,
        "train/seconds": state.seconds,
        "train/tokens_per_s": _median_speed(log, state),
    }
    if state.best_step:
        metrics["best/step"] = state.best_step
    metrics |= _epochs(log, state)
    return {
        "schema_version": 1,
        "status": "done",
        "digest": cell.digest,
        "label": cell.label,
        "seed": cell.seed,
        "outcome": outcome.ending._asdict(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "weights": steps,
        "metrics": metrics,
        "signatures": signatures,
        "samples": samples,
        "references": references,
        "data": {
            "folder": f"{data.parent.name}/{data.name}",
            "digest": data.name,
            "content_sha256": content_sha256(data),
        },
    }


def require_same_data(folder: Path, data: Path) -> None:
    """Raise AttnbenchError if a cell was begun with other data than these."""
    note = _data_note(folder)
    if note.exists() and read_json(note, RUN_AGAIN).get("content_sha256") != content_sha256(data):
        raise AttnbenchError(
            f"{folder}: the data prepared in {data} are not those that this cell began with; prepare them again "
            "from the files that it had, or train it anew with --fresh"
        )


def note_start(folder: Path, data: Path, mechanisms: Mapping[str, str]) -> dict[str, Any]:
    """Note beside the checkpoints of a cell what they are trained on, and with which files. Returns the note: of a
    training that goes on it is the one that was made when it began, and older ones name no files."""
    note, begins = _data_note(folder), not checkpoint_steps(folder / CHECKPOINTS)
    if begins or not note.exists():
        write_json(note, {"content_sha256": content_sha256(data), **({MECHANISMS: dict(mechanisms)} if begins else {})})
    return read_json(note, RUN_AGAIN)


def trained_with(folder: Path) -> dict[str, str]:
    """The files that a cell's model was begun with; none where that was not noted."""
    return read_json(_data_note(folder), RUN_AGAIN).get(MECHANISMS) or {}


def _data_note(folder: Path) -> Path:
    return folder / CHECKPOINTS / "data.json"


def content_sha256(data: Path) -> str:
    """One hash of the splits and the bounds of their documents: equal wherever they were prepared, whatever with."""
    files = read_manifest(data)["files"]
    splits = {name: file["sha256"] for name, file in files.items() if name.endswith((".ids", ".txt", ".raw", ".docs"))}
    return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()


def _epochs(log: list[dict[str, Any]], state: TrainState) -> dict[str, float]:
    """Whole passes over the data: how many were made, how many lay behind the best weights, how long one took."""
    found: dict[str, float] = {"train/epochs": state.cursor[0]}
    for line in log:
        if "valid/loss" in line and line["step"] == state.best_step:
            found["best/epoch"] = line["epoch"]
    seconds = [line["epoch/seconds"] for line in log if "epoch/seconds" in line]
    return {**found, "train/seconds_per_epoch": statistics.median(seconds)} if seconds else found


def _median_speed(log: list[dict[str, Any]], state: TrainState) -> float:
    """Median over the log's windows, so that a pause of the machine spoils one of them; without any, the mean."""
    speeds = [line["train/tokens_per_s"] for line in log if "train/tokens_per_s" in line]
    return statistics.median(speeds) if speeds else state.tokens / max(state.seconds, 1e-9)
