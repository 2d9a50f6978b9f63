"""A spec that trains in a second, and its data, prepared once."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.core.files import dump_yaml
from attnbench.experiment import executor
from attnbench.experiment.document import read_document
from attnbench.experiment.executor import CellOutcome
from attnbench.experiment.grid import Cell, Experiment, expand
from attnbench.experiment.preparation import prepare_data
from attnbench.experiment.run import Run
from attnbench.experiment.session import run_grid
from attnbench.experiment.settings import Settings

SPEC: dict[str, Any] = {
    "name": "tiny",
    "task": {"kind": "translation", "dataset": {"kind": "demo", "pairs": 60, "held_out": 6}},
    "model": {
        "kind": "transformer", "layers": 1, "width": 16, "heads": 2, "ffn": 16, "tie": "decoder",
        "attention": {"default": {"transform": "topk"}},
    },
    "train": {
        "schedule": {"kind": "constant", "lr": 0.01}, "batch_tokens": 128, "max_steps": 4, "validate_every": 2,
        "log_every": 1,
    },
    "search": {"kind": "greedy", "max_ratio": 0.0, "max_extra": 4},
    "grid": {"axes": {"model.attention.default.budget": [1, "inf"]}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_process() -> Iterator[None]:
    """Cells choose their threads and how float32 is multiplied; other tests should not notice."""
    threads = torch.get_num_threads()
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    precision = getattr(matmul, "fp32_precision", None)
    logger = logging.getLogger("attnbench")
    kept = logger.handlers, logger.propagate, logger.level
    yield
    torch.set_num_threads(threads)
    if precision is not None:
        matmul.fp32_precision = precision
    logger.handlers, logger.propagate = kept[:2]
    logger.setLevel(kept[2])


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache")
    spec = tmp_path_factory.mktemp("spec") / "tiny.yaml"
    spec.write_text(dump_yaml(SPEC))
    prepare_data(expand(read_document(spec)).cells, Settings(path, path, offline=True))
    return path


def merged(below: Any, above: Any) -> Any:
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}
    return copy.deepcopy(above)


class Bench:
    """A working directory with a spec in it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache
        self.runs = folder / "runs"

    def write(self, text: str, name: str = "spec.yaml") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def spec(self, changes: Mapping[str, Any] | None = None, name: str = "spec.yaml") -> Path:
        """The tiny spec with changes merged in; its grid is replaced."""
        changes = dict(changes or {})
        grid = changes.pop("grid", SPEC["grid"])
        return self.write(dump_yaml({**merged(SPEC, changes), "grid": grid}), name)

    def experiment(self, changes: Mapping[str, Any] | None = None, *overrides: str) -> Experiment:
        return expand(read_document(self.spec(changes), overrides))

    def settings(self, **options: Any) -> Settings:
        return Settings(self.runs, self.cache, **options)

    def run(self, experiment: Experiment, **options: Any) -> list[CellOutcome]:
        return list(run_grid(experiment, self.settings(**options), "attnbench test"))

    def cell(self, experiment: Experiment, index: int = 0) -> Path:
        return self.runs / experiment.name / "cells" / experiment.cells[index].folder


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that were run, each finished at once; cells of seed 13 fail."""
    seen: list[Cell] = []

    def run_cell(cell: Cell, run: Run, place: Any, listen: Any) -> None:
        seen.append(cell)
        if cell.seed == 13:
            raise RuntimeError("bad luck")
        run.finish({"digest": cell.digest, "metrics": {"test/bleu": 1.0}})

    monkeypatch.setattr(executor, "run_cell", run_cell)
    return seen


@pytest.fixture
def bench(tmp_path: Path, cache: Path) -> Bench:
    return Bench(tmp_path, cache)


@pytest.fixture
def snapshot() -> Callable[..., dict[str, bytes | None]]:
    """snapshot(folder, ...) -> the content of every file below, None for a folder."""

    def take(*folders: Path) -> dict[str, bytes | None]:
        return {
            str(path): path.read_bytes() if path.is_file() else None
            for folder in folders
            for path in [folder, *folder.rglob("*")]
        }

    return take


@pytest.fixture
def experiment(bench: Any) -> Experiment:
    return bench.experiment()


@pytest.fixture
def fill() -> Callable[[Path, str], None]:
    """What a finished cell of a digest leaves in its folder."""

    def write(folder: Path, digest: str) -> None:
        for name in (
            "spec.yaml",
            "hyps/test.txt",
            "checkpoints/step-1/state.pt",
            "metrics.jsonl",
            "traceback.txt",
            ".x.12345678",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        (folder / "result.json").write_text(json.dumps({"digest": digest, "metrics": {}}))

    return write
