"""A training that is cut off goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.core.errors import AttnbenchError
from attnbench.train.state import checkpoint_steps


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def finished(toy: Any) -> tuple[Any, ...]:
    last = checkpoint_steps(toy.log.checkpoints)[-1]
    return toy.log.untimed(), toy.weights(last), toy.moments(last), checkpoint_steps(toy.log.checkpoints)


def same(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys()
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])
    assert torch.equal(one[2], two[2])
    assert one[3] == two[3]


FIELDS: dict[str, Any] = {"max_steps": 23, "log_every": 3, "validate_every": 5, "accumulate": 2, "clip": 0.5}


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"validate_every": "epoch"}], ids=str)
def test_a_training_cut_off_anywhere_ends_as_if_it_had_not_been(toys: Any, changes: dict[str, Any]):
    whole = toys(name="whole", **FIELDS | changes)
    whole()
    cut = toys(name="cut", **FIELDS | changes)

    def kill(batch: Any) -> None:
        if len(cut.task.seen) in (3, 7, 20, 28, 45):  # counted over all attempts
            raise Killed

    cut.task.before_loss = kill
    deaths = 0
    while True:
        try:
            outcome = cut()
            break
        except Killed:
            deaths += 1
    assert deaths == 5
    assert outcome.state.step == 23
    assert outcome.resumed_seconds > 0
    same(finished(cut), finished(whole))


@pytest.mark.parametrize("victim", ["torch.save", "attnbench.train.state.save_file", "attnbench.core.files.os.replace"])
@pytest.mark.parametrize("late", [False, True])
def test_a_kill_while_a_checkpoint_is_written(toys: Any, monkeypatch: pytest.MonkeyPatch, victim: str, late: bool):
    whole, cut = toys(name="whole", **FIELDS), toys(name="cut", **FIELDS)
    whole()
    with monkeypatch.context() as patch:
        module, _, name = victim.rpartition(".")
        owner: Any = __import__("importlib").import_module(module.removesuffix(".os")) if module else None
        owner = owner.os if module.endswith(".os") else owner
        real, calls = getattr(owner, name), 0

        def dies(*arguments: Any, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 3 and not late:
                raise Killed
            real(*arguments, **options)
            if calls == 3:
                raise Killed

        patch.setattr(owner, name, dies)
        with pytest.raises(Killed):
            cut()
    cut()
    same(finished(cut), finished(whole))


def test_a_kill_before_old_checkpoints_are_removed(toys: Any, monkeypatch: pytest.MonkeyPatch):
    whole, cut = toys(name="whole"), toys(name="cut")
    whole()
    with monkeypatch.context() as patch:
        patch.setattr("attnbench.train.loop.prune", lambda folder, keep: dies() if 6 in keep else None)

        def dies() -> None:
            raise Killed

        with pytest.raises(Killed):
            cut()
    assert checkpoint_steps(cut.log.checkpoints) == [2, 4, 6]
    cut()
    same(finished(cut), finished(whole))


def test_lines_past_the_checkpoint_are_cut(toys: Any):
    toy = toys(max_steps=6, validate_every=4, log_every=1)

    def kill(batch: Any) -> None:
        if len(toy.task.seen) == 6:
            raise Killed

    toy.task.before_loss = kill
    with pytest.raises(Killed):
        toy()
    assert [line["step"] for line in toy.log.lines] == [1, 2, 3, 4, 4, 5]
    toy()
    assert [line["step"] for line in toy.log.lines] == [1, 2, 3, 4, 4, 5, 6, 6]


def test_seconds_with_other_programs_on_the_cores_are_those_of_all_attempts(toys: Any):
    """As its seconds are: of updates that a checkpoint holds, without validations."""
    toy, busy = toys(max_steps=6, validate_every=4), 0.0
    validate = toy.task.validate

    def update(batch: Any) -> None:
        nonlocal busy
        busy += 1
        if len(toy.task.seen) == 6:
            raise Killed

    def validated(*given: Any) -> Any:
        nonlocal busy
        busy += 100
        return validate(*given)

    toy.task.before_loss, toy.task.validate = update, validated
    toy.options["shared"] = lambda: busy
    with pytest.raises(Killed):
        toy()
    outcome = toy()
    assert (outcome.resumed_shared, outcome.state.shared_seconds) == (4, 6)


def test_a_damaged_checkpoint_stops_the_training_and_the_mend_helps(toys: Any, tmp_path: Path):
    whole, toy = toys(name="whole"), toys()
    whole()
    toy()
    newest = toy.log.checkpoints / "step-6"
    (newest / "state.pt").write_bytes(b"")
    with pytest.raises(AttnbenchError, match=r"step-6/state\.pt: cannot be read.*remove the folder"):
        toy()
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    toy()
    same(finished(toy), finished(whole))
