"""Batches on their way to a model: what it sees of their sources, and where."""

from __future__ import annotations

import torch

from attnbench.core.tree import X, map_batch
from attnbench.data.base import Batch
from attnbench.models.base import Source


def to_device(tree: X, device: torch.device) -> X:
    """To a GPU without waiting for it: what is asked of it next finds the tensors there."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    return map_batch(move, tree)


def source_of(batch: Batch, device: torch.device | None = None) -> Source:
    """What the model sees of a batch's sources, on `device` or where they are."""
    moved = batch if device is None else to_device(batch, device)
    return Source(moved.source, moved.source_valid, None if moved.fertility is None else moved.fertility.float())
