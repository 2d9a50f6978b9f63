"""Multi-head attention: the five stages on every head, keys and values projected once (Vaswani et al. 2017, 3.2)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnbench.attention.modules.base import Attention, ModuleSpec, Site, modules
from attnbench.attention.patterns.base import dense
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.types import ROLES, AttentionOutput, Dims, History, Memory, Positions, Role
from attnbench.core.dropout import Dropout


class MultiHead(Attention):
    """width: D, split over `dims.heads` heads of width D / H."""

    def __init__(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> None:
        super().__init__()
        if width % dims.heads:
            raise ValueError(f"width {width} cannot be split over {dims.heads} heads")
        self.heads = dims.heads
        self.project_query = nn.Linear(dims.query_width, width)
        self.project_memory = nn.Linear(dims.key_width, 2 * width)
        self.project_context = nn.Linear(width, width)
        self.score = site.score.build(dims)
        self.transform = site.transform.build(dims)
        self.rule = site.pattern.mask_mod(role, dims.layer)
        self.dense_in_eval = site.sparsify == "train"
        self.dropout = Dropout(dropout)
        for projection in (self.project_query, self.project_memory, self.project_context):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def _split(self, states: Float[Tensor, "B N D"]) -> Float[Tensor, "B H N E"]:
        return states.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def memorize(
        self,
        keys: Float[Tensor, "B K D"],
        valid: Bool[Tensor, "B K"] | None,
        values: Float[Tensor, "B K D"] | None = None,
    ) -> Memory:
        if valid is not None:  # a masked state may hold anything, NaN too; weight 0 times NaN would be NaN
            keys = keys.masked_fill(~valid.unsqueeze(-1), 0.0)
            values = None if values is None else values.masked_fill(~valid.unsqueeze(-1), 0.0)
        if values is None:
            key, value = self.project_memory(keys).chunk(2, -1)
        else:
            weight, bias = self.project_memory.weight, self.project_memory.bias
            half = weight.shape[0] // 2
            key = nn.functional.linear(keys, weight[:half], bias[:half])
            value = nn.functional.linear(values, weight[half:], bias[half:])
        return Memory(self._split(key), self._split(value), valid)

    def allocate(self, rows: int, capacity: int, like: Tensor) -> Memory:
        width = self.project_query.out_features // self.heads
        empty = like.new_zeros(rows, self.heads, capacity, width)
        return Memory(empty, torch.zeros_like(empty), None, 0)

    def append(self, memory: Memory, new: Float[Tensor, "B Q D"]) -> Memory:
        start = memory.filled or 0
        end = start + new.shape[1]
        if end > memory.keys.shape[2]:
            raise ValueError(f"the cache holds {memory.keys.shape[2]} positions; {end} were asked for")
        added = self.memorize(new, None)
        memory.keys[:, :, start:end] = added.keys
        memory.values[:, :, start:end] = added.values
        return memory._replace(filled=end)

    def _allowed(self, memory: Memory, positions: Positions) -> Bool[Tensor, "#B #H #Q K"] | None:
        allowed = None if memory.valid is None else memory.valid[:, None, None, :]
        if self.rule is not None:
            rule = dense(self.rule, positions, self.heads)
            allowed = rule if allowed is None else allowed & rule
        return allowed

    def forward(
        self,
        query: Float[Tensor, "B Q D"],
        memory: Memory,
        positions: Positions,
        *,
        history: History | None = None,
        need_weights: bool = False,
    ) -> AttentionOutput:
        keys, values = memory.keys, memory.values
        if memory.filled is not None:
            keys, values = keys[:, :, : memory.filled], values[:, :, : memory.filled]
        queries = self._split(self.project_query(query))
        with torch.autocast(queries.device.type, enabled=False):  # ties of low precision would let top-k keep too many
            scores = (
                self.score(queries.float(), keys.float()) if queries.dtype.itemsize < 4 else self.score(queries, keys)
            )
        transform = softmax if self.dense_in_eval and not self.training else self.transform
        weights = transform(scores, valid=self._allowed(memory, positions))
        mixed = self.dropout(weights).to(values.dtype) @ values
        context = self.project_context(mixed.transpose(1, 2).flatten(2))
        return AttentionOutput(context, weights if need_weights else None, history)


@modules.register
class MultiHeadSpec(ModuleSpec):
    """H heads side by side; the number of heads is the model's."""

    kind: Literal["multihead"] = "multihead"
    roles: ClassVar[frozenset[Role]] = frozenset(ROLES)
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.2.2"

    def build(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> Attention:
        return MultiHead(site, role, width, dims, dropout)
