"""The interface of an attention module: memorise the keys once, then answer queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, get_args

from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from attnbench.attention.site import Site, Stage
from attnbench.attention.types import AttentionOutput, Dims, History, Memory, Positions, Role
from attnbench.core.inherit import is_outdated
from attnbench.core.ragged import Ragged
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


class Attention(nn.Module, ABC):
    """State (Memory, History) is passed in and returned, never kept on the module."""

    context_width: int
    """Width of the contexts."""
    keeps_history: bool = False
    """True: what a query receives depends on what was attended before. Then queries come a step at a time, those of one
    call being hypotheses that stand side by side, and the History that comes back goes into the next step."""

    @abstractmethod
    def memorize(
        self,
        keys: Float[Tensor, "B K D"],
        valid: Bool[Tensor, "B K"] | None,
        values: Float[Tensor, "B K D2"] | None = None,
        *,
        need_weights: bool = False,
    ) -> Memory:
        """All that depends on the keys alone, computed once; the caller adds fertilities, where the site spends any.

        values: None takes the keys for values too.

        need_weights: keep what forward() needs to tell weights over the keys, where that is more than the Memory.
        """

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
        """What each query receives. `positions` are absolute, so a decode step gives what a full pass gives.

        need_weights: return the weights over the keys, too; None where the Memory was made without what they need.
        """

    def memorize_ragged(self, keys: Float[Tensor, "N D"], ragged: Ragged, valid: Bool[Tensor, "B K"] | None) -> Memory:
        """`memorize` of keys without their padding. valid: as there; None where causality hides the padding."""
        return self.memorize(ragged.pad(keys).squeeze(1), valid)

    def answer_ragged(
        self, query: Float[Tensor, "N D"], ragged: Ragged, memory: Memory, positions: Positions
    ) -> Float[Tensor, "N D2"]:
        """The context that `forward` gives to each query, of queries without their padding."""
        context = self(ragged.pad(query).squeeze(1), memory, positions).context
        return ragged.take(context.unsqueeze(1))


class SelfAttention(Attention):
    """Attention over a sequence that grows: its Memory can be a cache."""

    @abstractmethod
    def allocate(self, rows: int, capacity: int, like: Tensor) -> Memory:
        """An empty cache for causal self-attention, with the dtype and device of `like`."""

    @abstractmethod
    def append(self, memory: Memory, new: Float[Tensor, "B Q D"]) -> Memory:
        """The cache with Q more positions. Written in place: the Memory passed in is spent."""

    def held(self, memory: Memory, shared: int) -> list[Shaped[Tensor, "B ..."]]:
        """What a cache knows of each row, but for what its first `shared` positions gave: a beam moves these rows, in
        place. Keys and values by position, unless a module says otherwise."""
        return [each[:, :, shared : memory.filled] for each in (memory.keys, memory.values) if each is not None]


class ModuleSpec(Spec):
    """The fields of one attention module in YAML, and how to build it."""

    kind: str
    roles: ClassVar[frozenset[Role]]
    stages: ClassVar[frozenset[Stage]] = frozenset(get_args(Stage))
    """The stages of the pipeline that it uses; another one given beside it is a fault."""
    headed: ClassVar[bool | None] = None
    """Whether the model's heads split the width of the queries; None: nobody knows."""
    paper: ClassVar[str] = ""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if is_outdated(cls, "headed", "build"):
            cls.headed = None

    def check(self, site: Site, query_width: int, key_width: int) -> None:
        """Raise ValueError where it cannot stand between queries and keys of these widths."""

    @property
    def most(self) -> int | None:
        """The most keys that the site's transform weighs, where the module decides it; None: as many as there are."""
        return None

    @property
    def averages(self) -> bool:
        """Whether a context is a mean of values where the transform's weights sum to 1; else it may be any sum."""
        return True

    def require(self, longest_source: int | None) -> None:
        """Raise ValueError when a field was not given that what is known of the sources' length cannot replace."""

    def build(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> Attention:
        """width: of the contexts, where the module chooses; dropout: on the weights, in training.

        A module that can stand at `encoder_self` or `decoder_self` is a SelfAttention.
        """
        raise unwritten(self, "build")


modules: Registry[ModuleSpec] = Registry("module", ModuleSpec, "attnbench.attention.modules")
ModuleField = Annotated[ModuleSpec, Family(lambda: modules)]
