"""A device that is one update ahead of the host: the same training, the same log, and a divergence told in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.train.runtime import Runtime
from attnbench.train.state import checkpoint_steps


@dataclass(frozen=True)
class Ahead(Runtime):
    """waiting: the updates whose numbers nobody has read yet. most: how many these were at most."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    waiting: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=lambda: [0])

    def ahead(self) -> int:
        return 1

    def fetch(self, values: Tensor) -> Callable[[], list[float]]:
        self.waiting.append(len(self.waiting))
        here = values.tolist()

        def numbers() -> list[float]:
            self.most[0] = max(self.most[0], len(self.waiting))
            self.waiting.pop()
            return here

        return numbers


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 13, "log_every": 5, "validate_every": 4, "clip": 0.5},
        {"max_steps": 12, "log_every": 3, "validate_every": 6},
        {"max_steps": 1000, "max_epochs": 3, "validate_every": "epoch", "log_every": 7},
        {"max_steps": 1000, "max_epochs": 2, "accumulate": 2, "log_every": 1},
    ],
)
def test_it_is_the_same_training(toys: Any, changes: dict[str, Any]):
    plain, ahead = toys(**changes), toys(runtime=(runtime := Ahead()), name="ahead", **changes)
    assert ahead().state.step == plain().state.step
    assert ahead.log.untimed() == plain.log.untimed()
    assert runtime.most == [2 if changes["log_every"] > 1 else 1]
    assert runtime.waiting == []
    for ours, theirs in zip(ahead.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("at", "kept"), [(1, []), (3, [2]), (4, [2]), (5, [2, 4])])
def test_a_number_that_is_lost_ends_it_before_a_checkpoint_holds_it(toys: Any, at: int, kept: list[int]):
    count = 0

    def poison(batch: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            batch.x[0, 0] = math.nan

    toy = toys(toys.Task(before_loss=poison), runtime=Ahead(), max_steps=20)
    outcome = toy()
    assert outcome.ending[:2] == ("diverged", at)
    assert outcome.ending.seen == "the loss or the gradient is not finite"
    assert checkpoint_steps(toy.log.checkpoints) == kept
    assert toy.log.lines[-1] == {"step": at, "event": outcome.ending.text}
    assert count <= at + 1
