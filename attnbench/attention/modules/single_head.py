"""Attention as recurrent and convolutional decoders use it: one head on the states as they are."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.modules._scored import Scored
from attnbench.attention.modules._stages import blank
from attnbench.attention.modules.base import Attention, ModuleSpec, modules
from attnbench.attention.site import Site
from attnbench.attention.types import AttentionOutput, Dims, History, Memory, Positions, Role


class SingleHead(Scored, Attention):
    """Nothing is projected but by the score; the context is a mix of the values themselves."""

    def __init__(self, site: Site, role: Role, dims: Dims, dropout: float) -> None:
        super().__init__(site, role, dims._replace(heads=1), dropout)
        self.context_width = dims.key_width

    def memorize(
        self,
        keys: Float[Tensor, "B K D"],
        valid: Bool[Tensor, "B K"] | None,
        values: Float[Tensor, "B K D"] | None = None,
        *,
        need_weights: bool = False,
    ) -> Memory:
        keys = blank(keys, valid)
        values = keys if values is None else blank(values, valid)
        covered = None if self.coverage is None else self.coverage.memorize(keys)
        return Memory(self.score.keys(keys.unsqueeze(1)), values.unsqueeze(1), valid, coverage=covered)

    def forward(
        self,
        query: Float[Tensor, "B Q D"],
        memory: Memory,
        positions: Positions,
        *,
        history: History | None = None,
        need_weights: bool = False,
    ) -> AttentionOutput:
        context, weights, history = self.mix(query.unsqueeze(1), memory, positions, history, need_weights)
        return AttentionOutput(context.squeeze(1), weights if need_weights else None, history)


@modules.register
class SingleHeadSpec(ModuleSpec):
    """One head without projections: the score compares the states themselves, and they are what is mixed."""

    kind: Literal["single_head"] = "single_head"
    roles: ClassVar[frozenset[Role]] = frozenset({"cross"})
    headed: ClassVar[bool | None] = False
    paper: ClassVar[str] = "Bahdanau et al. 2015, section 3.1; Luong et al. 2015, section 3.1"

    def check(self, site: Site, query_width: int, key_width: int) -> None:
        site.score.check(query_width, key_width)
        if site.coverage is not None and not site.score.takes_feature:
            raise ValueError(
                f"the score '{site.score.kind}' has no place for a coverage; take the score 'additive' or 'bilinear'"
            )

    def build(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> SingleHead:
        return SingleHead(site, role, dims, dropout)
