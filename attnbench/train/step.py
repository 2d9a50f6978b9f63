"""The parts of one update: gradients of some batches, and their norm."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnbench.tasks.base import Task
from attnbench.train.runtime import Runtime

Normalization = Literal["tokens", "sentences"]


def targets(task: Task, batches: list[Any], normalization: Normalization) -> int:
    """Target tokens, or target sentences, of the batches together."""
    count = task.count if normalization == "tokens" else task.sentences
    return sum(count(batch) for batch in batches)


def accumulate(
    task: Task, model: nn.Module, batches: list[Any], smoothing: float, runtime: Runtime,
    normalization: Normalization = "tokens",
) -> tuple[Float[Tensor, "2"], int]:  # fmt: skip
    """Gradients of the mean loss over the tokens, or the sentences, of every batch; (summed loss and nll, on the
    device), tokens."""
    tokens = targets(task, batches, "tokens")
    by = tokens if normalization == "tokens" else targets(task, batches, normalization)
    totals = [gradients(task, model, batch, by, smoothing, runtime) for batch in batches]
    return torch.stack(totals).sum(0), tokens


def gradients(
    task: Task, model: nn.Module, batch: Any, by: int | Tensor, smoothing: float, runtime: Runtime
) -> Float[Tensor, "2"]:
    """Gradients of one batch's loss, divided by `by`, are added to those that are there; its loss and nll."""
    with runtime.autocast():
        loss = task.loss(model, batch, smoothing)
    (loss.total / by).backward()
    return torch.stack([loss.total.detach(), loss.nll.detach()])


def clip(model: nn.Module, limit: float) -> Float[Tensor, ""]:
    """The norm of the gradient, on the device; the gradient is scaled down to `limit` unless that is 0."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if limit:  # scaling by NaN would hide where it came from: taken for short, such a gradient is left as it is
        nn.utils.clip_grads_with_norm_(parameters, limit, norm.nan_to_num(0.0, 0.0, 0.0))
    return norm
