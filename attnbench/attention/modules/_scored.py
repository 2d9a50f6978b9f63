"""What modules that score every key share: score, pattern, transform, dropout and mixing."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnbench.attention.modules.base import Site
from attnbench.attention.patterns.base import dense
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.types import Dims, Memory, Positions, Role
from attnbench.core.dropout import Dropout


class Scored(nn.Module):
    """The stages of the pipeline, built for queries and keys of the widths in `dims`, on each of its heads."""

    def __init__(self, site: Site, role: Role, dims: Dims, dropout: float) -> None:
        super().__init__()
        self.score = site.score.build(dims)
        self.transform = site.transform.build(dims)
        self.rule = site.pattern.mask_mod(role, dims.layer)
        self.heads = dims.heads
        self.dense_in_eval = site.sparsify == "train"
        self.dropout = Dropout(dropout)

    def _allowed(self, memory: Memory, positions: Positions) -> Bool[Tensor, "#B #H #Q K"] | None:
        allowed = None if memory.valid is None else memory.valid[:, None, None, :]
        if self.rule is not None:
            rule = dense(self.rule, positions, self.heads)
            allowed = rule if allowed is None else allowed & rule
        return allowed

    def mix(
        self, queries: Float[Tensor, "B H Q E"], memory: Memory, positions: Positions
    ) -> tuple[Float[Tensor, "B H Q E2"], Float[Tensor, "B H Q K"]]:
        """Context of each query, and its weights before dropout."""
        keys, values = memory.keys, memory.values
        assert keys is not None  # the modules that score make Memories with keys
        if memory.filled is not None:
            keys, values = keys[:, :, : memory.filled], values[:, :, : memory.filled]
        if min(queries.dtype.itemsize, keys.dtype.itemsize) < 4:  # ties of low precision would let top-k keep too many
            queries, keys = queries.float(), keys.float()
        with torch.autocast(queries.device.type, enabled=False):
            scores = self.score(queries, keys)
        transform = softmax if self.dense_in_eval and not self.training else self.transform
        weights = transform(scores, valid=self._allowed(memory, positions))
        return self.dropout(weights).to(values.dtype) @ values, weights


def blank(states: Float[Tensor, "B K D"], valid: Bool[Tensor, "B K"] | None) -> Float[Tensor, "B K D"]:
    """The states with 0 where they are masked: one may hold anything, NaN too, and weight 0 times NaN is NaN."""
    return states if valid is None else states.masked_fill(~valid.unsqueeze(-1), 0.0)
