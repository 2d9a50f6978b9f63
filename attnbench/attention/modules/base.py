"""The interface of an attention module: memorise the keys once, then answer queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnbench.attention.patterns.base import PatternSpec
from attnbench.attention.scores.base import ScoreSpec
from attnbench.attention.transforms.base import TransformSpec
from attnbench.attention.types import AttentionOutput, Dims, History, Memory, Positions, Role
from attnbench.core.registry import Family, Registry
from attnbench.core.spec import Spec


class Attention(nn.Module, ABC):
    """State (Memory, History) is passed in and returned, never kept on the module."""

    @abstractmethod
    def memorize(
        self,
        keys: Float[Tensor, "B K D"],
        valid: Bool[Tensor, "B K"] | None,
        values: Float[Tensor, "B K D2"] | None = None,
    ) -> Memory:
        """All that depends on the keys alone, computed once. values: None takes the keys for values too."""

    @abstractmethod
    def forward(
        self,
        query: Float[Tensor, "B Q D"],
        memory: Memory,
        positions: Positions,
        *,
        history: History | None = None,
        need_weights: bool = False,
    ) -> AttentionOutput:
        """What each query receives. `positions` are absolute, so a decode step gives what a full pass gives."""

    @abstractmethod
    def allocate(self, rows: int, capacity: int, like: Tensor) -> Memory:
        """An empty cache for causal self-attention, with the dtype and device of `like`."""

    @abstractmethod
    def append(self, memory: Memory, new: Float[Tensor, "B Q D"]) -> Memory:
        """The cache with Q more positions. Written in place: the Memory passed in is spent."""


class Site(NamedTuple):
    """The stages one module is built from. sparsify `train`: in eval mode softmax takes the transform's place."""

    score: ScoreSpec
    pattern: PatternSpec
    transform: TransformSpec
    sparsify: Literal["train", "both"] = "both"


class ModuleSpec(Spec):
    """The fields of one attention module in YAML, and how to build it."""

    kind: str
    roles: ClassVar[frozenset[Role]]
    paper: ClassVar[str] = ""

    def build(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> Attention:
        """width: the model width that queries have and contexts get back. dropout: on the weights, in training."""
        raise NotImplementedError


modules: Registry[ModuleSpec] = Registry("module", ModuleSpec, "attnbench.attention.modules")
ModuleField = Annotated[ModuleSpec, Family(lambda: modules)]
