"""What every sequence-to-sequence model offers to training and to search.

Laws (tests/conformance): stacking step() over a target equals logits(decode()); dimension 0 of every tensor in a
State is the row, so that core.tree.select_batch alone keeps some of them; a Memory has one row a source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnbench.attention.history import unfold
from attnbench.attention.types import Role
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec
from attnbench.core.tree import expand_batch, select_batch

if TYPE_CHECKING:
    from attnbench.models.fertility.base import Fertility

Maps = dict[Role, list[Float[Tensor, "B H Q K"]]]
"""Attention weights of each site, a tensor a layer."""

Wanted = bool | Literal["cross"]
"""Which weights decoding will be asked for: all, none, or those over the source alone."""


@dataclass(frozen=True)
class Source:
    """A batch of sources, padded on the right; on a GPU a `valid` that masks other positions may fail an assertion.

    fertility: how many target words each position is aligned to, at least 1, where that is known.
    """

    data: Int[Tensor, "B S"]
    valid: Bool[Tensor, "B S"]
    fertility: Float[Tensor, "B S"] | None = None


class Decoded(NamedTuple):
    """hidden: the decoder's last layer, before the output projection. maps: None unless asked for."""

    hidden: Float[Tensor, "B T D"]
    maps: Maps | None = None


class Sizes(NamedTuple):
    """What the data fixes about a model: rows of the embeddings (special ids included), and whether both share one."""

    source_vocab: int
    target_vocab: int
    joint: bool
    pad: int = 0
    longest_source: int | None = None
    """Tokens of the longest source, EOS included, where it is known without the data."""


class ModelSpec(Spec):
    """The fields of one model family in YAML, and how to build it."""

    kind: str
    sequential: ClassVar[bool] = False
    """Whether the decoder can go step by step in training, too, as stages that depend on earlier steps require. A model
    that cannot rejects such stages itself (models/_parallel.py)."""

    @property
    def attends(self) -> bool:
        """Whether the decoder can tell weights over the source."""
        return True

    @property
    def state_width(self) -> int | None:
        """D, the numbers in a state, which Noam's rule reads; None: they have no one width."""
        return None

    @property
    def most(self) -> int | None:
        """Tokens that it can read, BOS or EOS counted; None: any number."""
        return None

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError, where the model cannot be built for such data."""

    def build(self, sizes: Sizes) -> Seq2SeqModel:
        raise unwritten(self, "build")


models: Registry[ModelSpec] = Registry("model", ModelSpec, "attnbench.models")
ModelField = Annotated[ModelSpec, Family(lambda: models)]


class Seq2SeqModel(nn.Module, ABC):
    """Encoder and decoder. State is passed in and returned, never kept on the module.

    Memory and State are trees (core.tree) that only the model looks into; of a State without the fields `beams` and
    `received` it has its own `widen` and `received`.
    """

    target_vocab: int
    """V, how many logits there are."""
    max_length: int | None = None
    """Most tokens that decode() and step() can read, BOS included; None: any number. A search stops there."""

    @property
    def source_fertility(self) -> Fertility | None:
        """What tells how much attention each source word may receive; None: there is no bound."""
        return None

    @abstractmethod
    def encode(self, source: Source, *, need_weights: Wanted = False) -> Any:
        """The Memory of a batch: all that decoding needs of the sources, one row each."""

    @abstractmethod
    def decode(
        self,
        memory: Any,
        target_in: Int[Tensor, "B T"],
        *,
        valid: Bool[Tensor, "B T"] | None = None,
        need_weights: bool = False,
    ) -> Decoded:
        """Every target position at once (teacher forcing); `target_in` begins with BOS and is padded on the right.

        valid: which positions are no padding, from the left on; a model may leave the others out, and what is hidden
        there means nothing.
        With need_weights, `maps` holds every site, the encoder's too when encode() was asked for them.
        """

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Scores of the next token; apart from decode(), so that a loss may skip padding."""

    @abstractmethod
    def start(self, memory: Any, capacity: int, *, track: bool = False) -> Any:
        """The State before the first token: a row a source, and room for `capacity` tokens.

        track: sum up the attention over the source, for `received`; the Memory must hold what weights need.
        """

    @abstractmethod
    def step(self, memory: Any, state: Any, token: Int[Tensor, "R"]) -> tuple[Float[Tensor, "R V"], Any]:
        """Logits after one more token a row, those of a source adjacent, and the next State. The State passed in is
        spent."""

    def reorder(self, state: Any, rows: Int[Tensor, "R"], shared: int) -> Any:
        """The State with what row `rows[i]` held in row i, as many rows as before. The State passed in is spent.

        shared: what rows hold of their first so many tokens is the same in row i and row `rows[i]`.
        """
        return select_batch(state, rows)

    def keep(
        self, memory: Any, state: Any, sources: Int[Tensor, "n"], rows: Int[Tensor, "R"], shared: int = 0
    ) -> tuple[Any, Any]:
        """The Memory of some sources alone, and their State, with what row `sources[i]` and row `rows[i]` held in row
        i: those of each source are of one source before. Both that are passed in are spent.

        shared: as in `reorder`, of the rows of sources that stay where they are.
        """
        return select_batch(memory, sources), select_batch(state, rows)

    def widen(self, state: Any, beams: int) -> Any:
        """The State of one row a source as one of `beams` equal ones, adjacent."""
        return expand_batch(state, beams)._replace(beams=beams)

    def received(self, state: Any) -> Float[Tensor, "R S"]:
        """The weight that each source position has received in all steps, a mean over layers and heads; 1 a step at
        most.

        Of a State that was started with `track`.
        """
        return state.received


def require_same_shape(valid: Tensor | None, target_in: Tensor) -> None:
    """Raise ValueError where `valid` belongs to another target."""
    if valid is not None and valid.shape != target_in.shape:
        raise ValueError(f"valid {tuple(valid.shape)} does not belong to a target {tuple(target_in.shape)}")


_ROUNDING = 1e-3
"""By which weights that sum to 1 may miss it, in half precision too."""


def receive(
    before: Float[Tensor, "R S"] | None, maps: Sequence[Float[Tensor, "B H Q S"]]
) -> Float[Tensor, "R S"] | None:
    """What was received with one more step, whose weights are `maps`, one a layer; None where that is not tracked.

    A step gives 1 at most: gates, each of which may be 1, would cover every word at once.
    """
    if before is None:
        return None
    if not maps:
        raise ValueError("a model that attends to nothing has no attention to sum up; start without track")
    return before + at_most_one(torch.stack([unfold(weights).mean(1) for weights in maps]).mean(0))


def at_most_one(weights: Float[Tensor, "... S"]) -> Float[Tensor, "... S"]:
    """Rows that sum to more than 1, as those of gates may, divided by their sum; others as they are."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 1 + _ROUNDING, weights / total, weights)
