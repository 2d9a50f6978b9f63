from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from attnbench.core.errors import AttnbenchError
from attnbench.train.state import (
    TrainState,
    Window,
    _rng_of,
    checkpoint_steps,
    load_average,
    load_checkpoint,
    load_weights,
    prune,
    save_checkpoint,
    save_weights,
    weights_path,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.table.weight
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def stepped(seed: int) -> tuple[Tied, torch.optim.Optimizer]:
    """A model after one update, and its optimiser."""
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.out(model.table(torch.tensor([1, 2]))).square().sum().backward()
    optimizer.step()
    return model, optimizer


STATE = TrainState(
    7, (2, 3, 4), -1.5, 5, 1, 99, 1.25, Window(1.0, 2.0, 3, 4.0), Window(5.0, 6.0, 7, 8.0), shared_seconds=1.0
)


def test_a_checkpoint_from_before_epochs_and_shared_seconds_were_summed_up(tmp_path: Path):
    model, optimizer = stepped(1)
    save_checkpoint(tmp_path, model, optimizer, STATE)
    path = tmp_path / "step-7" / "state.pt"
    content = torch.load(path, weights_only=True)
    del content["train"]["passed"], content["train"]["shared_seconds"]
    torch.save(content, path)
    (path.parent / "SHA256SUMS").unlink()
    found = load_checkpoint(tmp_path, 7, model, optimizer)
    assert found == replace(STATE, passed=Window(), shared_seconds=0.0)


def test_a_checkpoint_restores_everything(tmp_path: Path):
    model, optimizer = stepped(1)
    torch.manual_seed(5)
    save_checkpoint(tmp_path, model, optimizer, STATE)
    drawn = torch.rand(3)
    other, fresh = stepped(2)
    assert load_checkpoint(tmp_path, 7, other, fresh) == STATE
    assert torch.equal(torch.rand(3), drawn)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), fresh.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert other.out.weight is other.table.weight


def test_tied_weights_are_kept_once(tmp_path: Path):
    save_weights(Tied(), tmp_path / "w.safetensors")
    assert set(load_file(tmp_path / "w.safetensors")) == {"table.weight", "out.bias", "seen"}


def test_steps_are_read_in_order_and_half_made_ones_left_out(tmp_path: Path):
    for name in ("step-10", "step-9", ".step-11.01234567~", "step-x", "other"):
        (tmp_path / name).mkdir()
    assert checkpoint_steps(tmp_path) == [9, 10]
    assert checkpoint_steps(tmp_path / "absent") == []


def test_prune_removes_what_is_not_kept(tmp_path: Path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, *stepped(1), TrainState(step))
    prune(tmp_path, {1, 3, 4})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-1", "step-3"]


def test_the_average_is_the_mean_of_the_weights(tmp_path: Path):
    models = {step: stepped(step)[0] for step in (1, 2, 4)}
    for step, model in models.items():
        save_checkpoint(tmp_path, model, torch.optim.Adam(model.parameters()), TrainState(step))
    target = Tied()
    load_average(target, tmp_path, [1, 2, 4])
    for name, tensor in target.state_dict().items():
        mean = torch.stack([model.state_dict()[name].double() for model in models.values()]).mean(0)
        assert torch.equal(tensor, mean.to(tensor.dtype))
    assert target.out.weight is target.table.weight
    load_average(target, tmp_path, [2])
    assert all(torch.equal(tensor, models[2].state_dict()[name]) for name, tensor in target.state_dict().items())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_pickle(path: Path) -> None:
    torch.save({"train": {}}, path)


def turn_a_bit(path: Path) -> None:
    """In the middle of the numbers, where no reader of the format looks."""
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(100.0, 108.0).numpy().tobytes()) + 9] ^= 1
    path.write_bytes(content)


def marked() -> tuple[Tied, torch.optim.Optimizer]:
    """A model and an optimiser in whose files known numbers stand."""
    model, optimizer = stepped(1)
    with torch.no_grad():
        model.table.weight.view(-1)[:8] = torch.arange(100.0, 108.0)
        optimizer.state[model.table.weight]["exp_avg"].view(-1)[:8] = torch.arange(100.0, 108.0)
    return model, optimizer


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_bit_that_turned_is_told(tmp_path: Path, name: str):
    model, optimizer = marked()
    save_checkpoint(tmp_path, model, optimizer, STATE)
    turn_a_bit(tmp_path / "step-7" / name)
    with pytest.raises(AttnbenchError, match=f"{name}.*cannot be read .its bytes are not those.*remove the folder"):
        load_checkpoint(tmp_path, 7, model, optimizer)
    if name == "model.safetensors":
        with pytest.raises(AttnbenchError, match=r"step-7/model\.safetensors.*its bytes are not those"):
            load_average(model, tmp_path, [7])


def test_a_checkpoint_of_an_earlier_version_is_taken_as_it_is(tmp_path: Path):
    model, optimizer = marked()
    save_checkpoint(tmp_path, model, optimizer, STATE)
    (tmp_path / "step-7" / "SHA256SUMS").unlink()
    turn_a_bit(tmp_path / "step-7" / "model.safetensors")
    assert load_checkpoint(tmp_path, 7, *stepped(2)) == STATE


def test_sums_are_those_of_sha256sum(tmp_path: Path):
    save_checkpoint(tmp_path, *stepped(1), STATE)
    files = {path.name: path.read_bytes() for path in (tmp_path / "step-7").iterdir()}
    lines = files.pop("SHA256SUMS").decode().splitlines()
    assert lines == [f"{hashlib.sha256(files[name]).hexdigest()}  {name}" for name in sorted(files)]
    assert sorted(files) == ["model.safetensors", "state.pt"]


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
@pytest.mark.parametrize("harm", [cut, Path.unlink, lambda path: path.write_bytes(b""), other_pickle])
def test_a_damaged_checkpoint_names_its_mend(tmp_path: Path, name: str, harm: Callable[[Path], object], sums: bool):
    model, optimizer = stepped(1)
    save_checkpoint(tmp_path, model, optimizer, STATE)
    if not sums:  # as those of earlier versions
        (tmp_path / "step-7" / "SHA256SUMS").unlink()
    harm(tmp_path / "step-7" / name)
    with pytest.raises(AttnbenchError, match=f"{name}.*cannot be read.*remove the folder .*step-7") as caught:
        load_checkpoint(tmp_path, 7, model, optimizer)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_a_later_version_is_not_called_damaged(tmp_path: Path):
    model, optimizer = stepped(1)
    save_checkpoint(tmp_path, model, optimizer, STATE)
    path = tmp_path / "step-7" / "state.pt"
    (path.parent / "SHA256SUMS").unlink()
    whole = torch.load(path, weights_only=True)
    for place in ((), ("window",), ("passed",)):
        content = copy.deepcopy(whole)
        functools.reduce(dict.__getitem__, place, content["train"])["warmth"] = 1.0
        torch.save(content, path)
        with pytest.raises(AttnbenchError, match="a later attnbench wrote this, which keeps warmth as well; go on"):
            load_checkpoint(tmp_path, 7, model, optimizer)


@pytest.mark.parametrize("at", ["attnbench.train.state.load_file", "torch.load"])
def test_a_checkpoint_is_not_blamed_for_what_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str):
    """Who removes it, as the message would say, loses a training to a full memory."""

    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    model, optimizer = stepped(1)
    save_checkpoint(tmp_path, model, optimizer, STATE)
    monkeypatch.setattr(at, full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        load_checkpoint(tmp_path, 7, model, optimizer)


def test_random_states_of_gpus_that_are_not_here(tmp_path: Path):
    model, optimizer = stepped(1)
    save_checkpoint(tmp_path, model, optimizer, STATE)
    path = tmp_path / "step-7" / "state.pt"
    (path.parent / "SHA256SUMS").unlink()
    content = torch.load(path, weights_only=True)
    assert content["rng_cuda"] == []
    states = [torch.full((16,), fill, dtype=torch.uint8) for fill in range(3)]
    torch.save({**content, "rng_cuda": states}, path)
    assert load_checkpoint(tmp_path, 7, model, optimizer) == STATE  # on a processor
    assert [int(_rng_of(states, torch.device("cuda", index))[0]) for index in range(5)] == [0, 1, 2, 0, 0]
    assert int(_rng_of(states[1:2], torch.device("cuda", 4))[0]) == 1


def test_a_disk_that_is_full_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: File too large (os error 27)")

    monkeypatch.setattr("attnbench.train.state.save_file", full)
    with pytest.raises(AttnbenchError, match=r"checkpoint 1 cannot be written .*too large.*free some space"):
        save_checkpoint(tmp_path, *stepped(1), TrainState(1))
    assert not list(tmp_path.iterdir())


def test_a_fault_of_another_kind_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def shared(*_: object) -> None:
        raise RuntimeError("Some tensors share memory")

    monkeypatch.setattr("attnbench.train.state.save_file", shared)
    with pytest.raises(RuntimeError, match="share memory"):
        save_checkpoint(tmp_path, *stepped(1), TrainState(1))


def test_weights_of_another_model_are_refused(tmp_path: Path):
    save_checkpoint(tmp_path, *stepped(1), TrainState(1))
    wider = Tied()
    wider.out = nn.Linear(3, 6)
    for load in (lambda: load_weights(wider, weights_path(tmp_path, 1)), lambda: load_average(wider, tmp_path, [1])):
        before = wider.table.weight.clone()
        with pytest.raises(AttnbenchError, match="belong to another model"):
            load()
        assert torch.equal(wider.table.weight, before)
