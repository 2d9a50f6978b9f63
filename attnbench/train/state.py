"""Checkpoints: weights and the state of training, whole on disk or absent, restored exactly."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnbench.core.errors import AttnbenchError, first_line
from attnbench.core.files import folder_atomic, remove_folder
from attnbench.core.memory import is_passing

_FULL = "I/O error|No space|File too large|PytorchStreamWriter|unexpected pos"
"""How safetensors and torch tell of a disk that takes no more."""
_SUMS = "SHA256SUMS"
"""Beside the files of a checkpoint, in the form of sha256sum; those of earlier versions have none."""


class OtherModelError(AttnbenchError):
    """Weights that belong to another model."""


class LaterError(AttnbenchError):
    """A checkpoint of which this version does not know all."""


@dataclass
class Window:
    """Sums over some updates: those since the last line of the log, or of an epoch."""

    loss: float = 0.0
    nll: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, loss: float, nll: float, tokens: int) -> None:
        self.loss += loss
        self.nll += nll
        self.tokens += tokens


@dataclass
class TrainState:
    """Where training stands: all that the next update depends on besides weights, optimiser and random state.

    cursor: (epoch, pool, batch) of the next batch. best: value of the selection metric at best_step. passed: what was
    seen of this epoch. least, newest: the least validation loss and the last one, in nats a token. lowest: the least
    training loss of an epoch, or that of the first update. risen: where it left that behind for good, so far: the first
    such epoch and its last update, and the loss of the latest: (update, epoch, loss). shared_seconds: those of
    `seconds` in which other programs used the same cores.
    """

    step: int = 0
    cursor: tuple[int, int, int] = (0, 0, 0)
    best: float | None = None
    best_step: int = 0
    stale: int = 0
    tokens: int = 0
    seconds: float = 0.0
    window: Window = field(default_factory=Window)
    passed: Window = field(default_factory=Window)
    least: float | None = None
    lowest: float | None = None
    risen: tuple[int, int, float] | None = None
    newest: float | None = None
    shared_seconds: float = 0.0


def _name(step: int) -> str:
    return f"step-{step}"


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the whole checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step-(\d+)", entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def save_weights(model: nn.Module, path: Path) -> None:
    """Every parameter once (tied ones under their first name), and the buffers that are saved."""
    save_file(_unique(model), path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Raises AttnbenchError when the file is damaged or belongs to another model."""
    tensors = _read_weights(model, path)
    with torch.no_grad():
        for name, tensor in _unique(model).items():
            tensor.copy_(tensors[name])


def _read_weights(model: nn.Module, path: Path) -> dict[str, Tensor]:
    try:
        path.open("rb").close()  # safetensors says of a file that may not be read that there is none
        _require_as_written(path)
        tensors = load_file(path)
    except Exception as error:  # safetensors raises its own type, which has no stable home
        if is_passing(error):
            raise
        raise AttnbenchError(
            f"{path}: these weights cannot be read ({first_line(error)}); remove the folder {path.parent} and run again"
        ) from None
    own = _unique(model)
    if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
        raise OtherModelError(
            f"{path}: these weights belong to another model; mend the spec, or remove the folder {path.parent}"
        )
    return tensors


def _unique(model: nn.Module) -> dict[str, Tensor]:
    seen: set[int] = set()
    unique = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unique[name] = tensor.data
    return unique


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
    """Write `folder`/step-<n>, renamed into place when whole. Raises AttnbenchError where the disk is full."""
    try:
        _save_checkpoint(folder / _name(state.step), model, optimizer, state)
    except Exception as error:
        if isinstance(error, OSError) or not re.search(_FULL, str(error)):
            raise
        raise AttnbenchError(
            f"{folder}: checkpoint {state.step} cannot be written ({first_line(error)}); free some space and run again"
        ) from error


def _save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> None:
    device = next(model.parameters()).device
    with folder_atomic(path) as work:
        save_weights(model, work / "model.safetensors")
        content: dict[str, Any] = {
            "train": asdict(state),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "rng_cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
        }
        torch.save(content, work / "state.pt")
        (work / _SUMS).write_text("".join(f"{_sum(file)}\n" for file in sorted(work.iterdir())), encoding="utf-8")


def _sum(path: Path) -> str:
    """The line of sha256sum for a file."""
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}"


def _require_as_written(path: Path) -> None:
    """Raise ValueError where a file of a checkpoint has changed: neither safetensors nor torch looks at what lies
    between its bounds."""
    sums = path.parent / _SUMS
    if sums.exists() and _sum(path) not in sums.read_text(encoding="utf-8", errors="replace").splitlines():
        raise ValueError(f"its bytes are not those that were written, as {_SUMS} beside it has them")


def load_checkpoint(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    """Restore weights, optimiser and random state, that of an Apple GPU aside; return where training stood.

    Raises AttnbenchError for a damaged checkpoint: an older one can be had by removing it; and for one that a later
    version of this package has written.
    """
    at, device = folder / _name(step), next(model.parameters()).device
    load_weights(model, at / "model.safetensors")
    try:
        _require_as_written(at / "state.pt")
        content = torch.load(at / "state.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["rng"])
        if content["rng_cuda"] and device.type == "cuda":
            torch.cuda.set_rng_state(_rng_of(content["rng_cuda"], device), device)
        train = content["train"]
        _require_known(train, at)
        windows = {name: Window(**train.get(name, {})) for name in ("window", "passed")}  # older ones lack `passed`
        return TrainState(**{**train, "cursor": tuple(train["cursor"]), **windows})
    except LaterError:
        raise
    except Exception as error:  # torch raises several types for a damaged file
        if is_passing(error):
            raise
        raise AttnbenchError(
            f"{at / 'state.pt'}: cannot be read ({first_line(error)}); remove the folder {at} and run again: "
            "training goes on from the checkpoint before it"
        ) from None


def _require_known(train: Mapping[str, Any], at: Path) -> None:
    later = sorted(train.keys() - {each.name for each in fields(TrainState)})
    for name in ("window", "passed"):
        later += sorted(train.get(name, {}).keys() - {each.name for each in fields(Window)})
    if later:
        raise LaterError(
            f"{at / 'state.pt'}: a later attnbench wrote this, which keeps {', '.join(later)} as well; go on with that "
            "version, or run with --fresh"
        )


def _rng_of(states: Sequence[Tensor], device: torch.device) -> Tensor:
    """The random state of a GPU: one is kept; older checkpoints hold those of every one that was there."""
    index = device.index or 0
    return states[index if index < len(states) else 0]


def prune(folder: Path, keep: Collection[int]) -> None:
    """Remove every checkpoint but the steps named."""
    for step in checkpoint_steps(folder):
        if step not in keep:
            remove_folder(folder / _name(step))


def load_average(model: nn.Module, folder: Path, steps: Sequence[int]) -> None:
    """Set the model to the mean, taken in float64, of the weights of several checkpoints.

    Raises AttnbenchError when one is damaged or belongs to another model.
    """
    totals: dict[str, Tensor] = {}
    for step in steps:
        for name, tensor in _read_weights(model, weights_path(folder, step)).items():
            wide = tensor.to(torch.float64)
            totals[name] = totals[name] + wide if name in totals else wide
    with torch.no_grad():
        for name, tensor in _unique(model).items():
            tensor.copy_(totals[name] / len(steps))


def weights_path(folder: Path, step: int) -> Path:
    """Of a checkpoint, below the folder of all."""
    return folder / _name(step) / "model.safetensors"
