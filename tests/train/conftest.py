"""A task small enough to train in a moment: a regression, with dropout so that random state matters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from attnbench.core.dropout import Dropout
from attnbench.core.seeding import derive, seed_everything
from attnbench.data.base import Cursor
from attnbench.tasks.base import Loss, Metrics
from attnbench.train.loop import TrainingOutcome, train
from attnbench.train.runtime import Runtime
from attnbench.train.spec import TrainSpec

PER_EPOCH = 5
"""Batches of an epoch."""


class Rows(NamedTuple):
    x: Tensor
    y: Tensor


def rows(*names: int, count: int = 6) -> Rows:
    generator = torch.Generator().manual_seed(derive(0, *names))
    x = torch.randn(count, 4, generator=generator)
    return Rows(x, x.sum(1, keepdim=True))


class ToyData:
    """An endless stream of batches of different sizes, a function of seed, epoch and place."""

    def batches(self, seed: int, *, tokens: int, start: Cursor) -> Iterator[tuple[Cursor, Rows]]:
        epoch, _, place = start
        while True:
            following = Cursor(epoch, 0, place + 1) if place + 1 < PER_EPOCH else Cursor(epoch + 1)
            yield following, rows(seed, epoch, place, count=2 + place)
            epoch, _, place = following


class ToyTask:
    """losses: what each validation finds, in turn; of_epochs: what a batch of each epoch loses a token, without a
    gradient; left out: the truth. before_loss: called with each batch."""

    def __init__(
        self,
        losses: list[float] | None = None,
        before_loss: Callable[[Rows], Any] | None = None,
        of_epochs: list[float] | None = None,
    ) -> None:
        self.losses = losses
        self.of_epochs = of_epochs
        self.before_loss = before_loss
        self.seen: list[Rows] = []

    def check(self, model: Any, data: Any) -> None:
        raise NotImplementedError

    def count(self, batch: Rows) -> int:
        return len(batch.y)

    def sentences(self, batch: Rows) -> int:
        return 2

    def loss(self, model: Any, batch: Rows, smoothing: float) -> Loss:
        self.seen.append(batch)
        if self.before_loss is not None:
            self.before_loss(batch)
        total = (model(batch.x) - batch.y).square().sum()
        if self.of_epochs is not None:
            total = total * 0 + self.of_epochs[(len(self.seen) - 1) // PER_EPOCH] * self.count(batch)
        return Loss(total * (1 - smoothing), total.detach())

    def validate(self, model: Any, data: Any, split: str, tokens: int) -> dict[str, float]:
        assert not model.training
        if self.losses is not None:
            return {"loss": self.losses.pop(0), "ppl": 1.0}
        batch = rows(1, 2, 3, 4)
        return {"loss": (model(batch.x) - batch.y).square().mean().item(), "ppl": 1.0}

    def evaluate(
        self, model: Any, data: Any, split: str, searcher: Any, tokens: int, *, brief: bool = False
    ) -> Metrics:
        assert split == "valid"
        return Metrics({"bleu": searcher(model)}, {}, {}, {})

    def decode(self, model: Any, batches: Any, searcher: Any, *, to_limit: bool = False) -> dict[int, Any]:
        raise NotImplementedError

    def sample_bleu(self, model: Any, data: Any, searcher: Any, tokens: int, size: int) -> float:
        assert not model.training
        return searcher(model) + size

    def inspect(self, model: Any, data: Any, split: str, tokens: int) -> Metrics:
        raise NotImplementedError

    def translate(self, model: Any, data: Any, lines: Any, searcher: Any) -> list[str]:
        raise NotImplementedError


class Log:
    """A recorder that keeps its lines in memory."""

    def __init__(self, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.lines: list[dict[str, Any]] = []

    def log(self, record: Mapping[str, Any]) -> None:
        self.lines.append(dict(record))

    def rewind(self, step: int) -> None:
        self.lines = [line for line in self.lines if line["step"] <= step]

    def of(self, name: str) -> list[Any]:
        """Every value of one name."""
        return [line[name] for line in self.lines if name in line]

    def untimed(self) -> list[dict[str, Any]]:
        """The lines without what a clock says."""
        timed = {"elapsed_s", "train/tokens_per_s", "valid/seconds", "epoch/seconds", "epoch/valid_seconds"}
        return [{name: value for name, value in line.items() if name not in timed} for line in self.lines]


class Toy:
    """One training of the toy task, which may be called again to go on."""

    def __init__(self, folder: Path, spec: TrainSpec, task: ToyTask | None = None, **options: Any) -> None:
        self.spec = spec
        self.log = Log(folder)
        self.task = task or ToyTask()
        self.options = options
        self.model = toy_model()

    def __call__(self) -> TrainingOutcome:
        self.model = toy_model()
        seed_everything(2)
        options: dict[str, Any] = {"runtime": Runtime(torch.device("cpu"), self.spec.precision), **self.options}
        return train(
            self.task, self.model, ToyData(), self.spec, seed=3, width=16, recorder=self.log, **options
        )  # fmt: skip

    def weights(self, step: int) -> dict[str, Tensor]:
        """Of one checkpoint."""
        return load_file(self.log.checkpoints / f"step-{step}" / "model.safetensors")

    def moments(self, step: int) -> Tensor:
        """Adam's first moments at one checkpoint, in one row: after one update a tenth of the gradient."""
        state = torch.load(self.log.checkpoints / f"step-{step}" / "state.pt", weights_only=True)
        return torch.cat([entry["exp_avg"].flatten() for entry in state["optimizer"]["state"].values()])


def toy_model() -> nn.Sequential:
    seed_everything(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Dropout(0.2), nn.Linear(8, 1))


def toy_spec(**changes: Any) -> TrainSpec:
    base: dict[str, Any] = {
        "schedule": {"kind": "constant", "lr": 0.01}, "label_smoothing": 0.0, "max_steps": 6, "log_every": 2,
        "validate_every": 2,
    }  # fmt: skip
    return TrainSpec.model_validate({**base, **copy.deepcopy(changes)})


class Toys:
    """toys(**train fields) -> a training that can be called; and the parts it is made of."""

    Task = ToyTask
    rows = staticmethod(rows)
    model = staticmethod(toy_model)
    spec = staticmethod(toy_spec)
    per_epoch = PER_EPOCH

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, task: ToyTask | None = None, *, validator: Any = None, runtime: Runtime | None = None, name: str = "run",
        **fields: Any,
    ) -> Toy:  # fmt: skip
        options = {} if runtime is None else {"runtime": runtime}
        return Toy(self.folder / name, toy_spec(**fields), task, validator=validator, **options)


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    return Toys(tmp_path)
