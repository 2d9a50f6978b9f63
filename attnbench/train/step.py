"""The parts of one update: gradients of some batches, and their norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.tasks.base import Task
from attnbench.train.runtime import Runtime


def accumulate(
    task: Task, model: nn.Module, batches: list[Any], smoothing: float, runtime: Runtime
) -> tuple[float, float, int]:
    """Gradients of the mean loss over the tokens of every batch; (summed loss, summed nll, tokens)."""
    tokens = sum(task.count(batch) for batch in batches)
    totals: list[Tensor] = []
    for batch in batches:
        with runtime.autocast():
            loss = task.loss(model, batch, smoothing)
        (loss.total / tokens).backward()
        totals.append(torch.stack([loss.total.detach(), loss.nll.detach()]))
    total, nll = torch.stack(totals).sum(0).tolist()
    return total, nll, tokens


def clip(model: nn.Module, limit: float) -> float:
    """The norm of the gradient, which is scaled down to `limit` unless that is 0."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if limit and math.isfinite(norm.item()):  # scaling by NaN would hide where it came from
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm.item()
