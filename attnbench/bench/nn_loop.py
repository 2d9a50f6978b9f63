"""The plain loop of torch in which its users train a model, and that other packages' trainers come down to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.bench.timer import Case
from attnbench.data.base import PAD, Batch


class Model(nn.Module):
    """What the loop trains: logits of every target token of padded sentences."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError


def training(
    group: str, name: str, model: Model, batches: list[Batch], optimizer: torch.optim.Optimizer, smoothing: float
) -> Case:
    """Updates in float32 on these batches: F.cross_entropy, no clipping. Work: target tokens, EOS counted."""
    model.train()

    def run() -> None:
        for batch in batches:
            optimizer.zero_grad()
            logits = model(batch.source, batch.target_in).flatten(0, 1)
            loss = nn.functional.cross_entropy(
                logits, batch.target_out.flatten(), ignore_index=PAD, label_smoothing=smoothing
            )
            loss.backward()
            optimizer.step()
            loss.item()

    return Case(group, name, run, sum(int(batch.target_valid.sum()) for batch in batches))
