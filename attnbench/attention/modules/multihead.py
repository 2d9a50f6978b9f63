"""Multi-head attention: the five stages on every head, keys and values projected once (Vaswani et al. 2017, 3.2)."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnbench.attention.modules._scored import Scored
from attnbench.attention.modules._stages import blank
from attnbench.attention.modules.base import ModuleSpec, SelfAttention, modules
from attnbench.attention.site import Site, Stage
from attnbench.attention.types import ROLES, AttentionOutput, Dims, History, Memory, Positions, Role
from attnbench.core import hooks
from attnbench.core.ragged import Ragged


class MultiHead(Scored, SelfAttention):
    """width: D, split over `dims.heads` heads of width D / H."""

    def __init__(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> None:
        if width % dims.heads:
            raise ValueError(f"width {width} cannot be split over {dims.heads} heads")
        head = width // dims.heads
        super().__init__(site, role, dims._replace(query_width=head, key_width=head), dropout)
        self.context_width = width
        self.project_query = nn.Linear(dims.query_width, width)
        self.project_memory = nn.Linear(dims.key_width, 2 * width)
        self.project_context = nn.Linear(width, width)
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
        *,
        need_weights: bool = False,
    ) -> Memory:
        keys = blank(keys, valid)
        if values is None:
            key, value = self.project_memory(keys).chunk(2, -1)
        else:
            weight, bias = self.project_memory.weight, self.project_memory.bias
            half = weight.shape[0] // 2
            key = nn.functional.linear(keys, weight[:half], bias[:half])
            value = nn.functional.linear(blank(values, valid), weight[half:], bias[half:])
        key, value = self._split(key), self._split(value)
        if not key.is_cuda:  # or each product copies them anew; kernels of a GPU read them where they are
            key, value = key.contiguous(), value.contiguous()
        return Memory(self.score.keys(key), value, valid)

    def memorize_ragged(self, keys: Float[Tensor, "N D"], ragged: Ragged, valid: Bool[Tensor, "B K"] | None) -> Memory:
        """Projects the tokens alone, unless a subclass has its own `memorize`, which is called then."""
        if type(self).memorize is not MultiHead.memorize:
            return super().memorize_ragged(keys, ragged, valid)
        key, value = ragged.pad_parts(self.project_memory(keys), self.heads, 2)
        return Memory(self.score.keys(key), value, valid)

    def allocate(self, rows: int, capacity: int, like: Tensor) -> Memory:
        head = self.context_width // self.heads
        keys = like.new_zeros(rows, self.heads, capacity, self.score.key_width)
        return Memory(keys, like.new_zeros(rows, self.heads, capacity, head), None, 0)

    def append(self, memory: Memory, new: Float[Tensor, "B Q D"]) -> Memory:
        grown = self.grown(memory, new.shape[1])
        start, end = memory.filled or 0, grown.filled
        key, value = (each.unflatten(-1, (self.heads, -1)) for each in self.project_memory(new).chunk(2, -1))
        assert memory.keys is not None  # allocate() made them
        memory.keys[:, :, start:end] = self.score.keys(key.transpose(1, 2))
        memory.values[:, :, start:end] = value.transpose(1, 2)
        return grown

    def grown(self, memory: Memory, more: int) -> Memory:
        """A cache with so many more positions, of which nothing is written yet. Raises ValueError where it is full."""
        end = (memory.filled or 0) + more
        if end > memory.values.shape[2]:
            raise ValueError(f"the cache holds {memory.values.shape[2]} positions; {end} were asked for")
        return memory._replace(filled=end)

    def forward(
        self,
        query: Float[Tensor, "B Q D"],
        memory: Memory,
        positions: Positions,
        *,
        history: History | None = None,
        need_weights: bool = False,
    ) -> AttentionOutput:
        mixed, weights, history = self.mix(
            self._split(self.project_query(query)), memory, positions, history, need_weights
        )
        context = self.project_context(mixed.transpose(1, 2).flatten(2))
        return AttentionOutput(context, weights if need_weights else None, history)

    def answer_ragged(
        self, query: Float[Tensor, "N D"], ragged: Ragged, memory: Memory, positions: Positions
    ) -> Float[Tensor, "N D2"]:
        """Projects the tokens alone, unless a subclass has its own `forward` or a hook wants to see what it takes and
        gives: that is called then."""
        if type(self).forward is not MultiHead.forward or hooks.are_on(self):
            return super().answer_ragged(query, ragged, memory, positions)
        queries = ragged.pad(self.project_query(query), self.heads)
        return self.project_context(ragged.take(self.mix(queries, memory, positions, None, False)[0]))


@modules.register
class MultiHeadSpec(ModuleSpec):
    """H heads side by side; the number of heads is the model's."""

    kind: Literal["multihead"] = "multihead"
    roles: ClassVar[frozenset[Role]] = frozenset(ROLES)
    stages: ClassVar[frozenset[Stage]] = frozenset({"score", "bias", "pattern", "transform"})
    headed: ClassVar[bool | None] = True
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.2.2"

    def build(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> MultiHead:
        return MultiHead(site, role, width, dims, dropout)
