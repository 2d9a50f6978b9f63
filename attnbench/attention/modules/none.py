"""No attention: the decoder knows of the source only what its first state holds (Sutskever et al. 2014)."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.modules.base import Attention, ModuleSpec, modules
from attnbench.attention.site import Site, Stage
from attnbench.attention.types import AttentionOutput, Dims, History, Memory, Positions, Role


class NoAttention(Attention):
    """Contexts of width 0."""

    context_width = 0

    def memorize(
        self,
        keys: Float[Tensor, "B K D"],
        valid: Bool[Tensor, "B K"] | None,
        values: Float[Tensor, "B K D2"] | None = None,
        *,
        need_weights: bool = False,
    ) -> Memory:
        return Memory(None, keys.new_zeros(keys.shape[0], 1, 0, 0))

    def forward(
        self,
        query: Float[Tensor, "B Q D"],
        memory: Memory,
        positions: Positions,
        *,
        history: History | None = None,
        need_weights: bool = False,
    ) -> AttentionOutput:
        return AttentionOutput(query.new_zeros(*query.shape[:2], 0), None, history)


@modules.register
class NoAttentionSpec(ModuleSpec):
    """Nothing is attended; only models whose decoder starts from the encoder's last state can do with it."""

    kind: Literal["none"] = "none"
    roles: ClassVar[frozenset[Role]] = frozenset({"cross"})
    stages: ClassVar[frozenset[Stage]] = frozenset()
    headed: ClassVar[bool | None] = False
    paper: ClassVar[str] = "Sutskever et al. 2014"

    def build(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> NoAttention:
        return NoAttention()
