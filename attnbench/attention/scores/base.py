"""The interface of a score and of its spec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnbench.attention.types import Dims
from attnbench.core.inherit import is_outdated
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


class Score(nn.Module, ABC):
    """How alike each query and each key are. What depends on the keys alone is computed once, by `keys`."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.key_width = dims.key_width
        """Width of what `keys` returns."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if is_outdated(cls, "scale", "forward"):
            # a parent's kernel does not score as this one does
            cls.scale = Score.scale  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def scale(self) -> float | None:
        """What products of queries and keys are multiplied by, where the score is nothing else; else None."""
        return None

    def keys(self, states: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H K E2"]:
        """The keys as `forward` wants them."""
        return states

    @abstractmethod
    def forward(
        self,
        query: Float[Tensor, "B H Q E"],
        keys: Float[Tensor, "B H K E2"],
        feature: Float[Tensor, "B Q K d"] | None = None,
    ) -> Float[Tensor, "B H Q K"]:
        """keys: from `keys`. feature: what a coverage tells of each key; None for a score built without."""


def project(states: Float[Tensor, "B H N E"], weight: Float[Tensor, "H E A"]) -> Float[Tensor, "B H N A"]:
    """One product a head; `states @ weight` would copy the weight for each row of the batch."""
    if len(weight) == 1:  # torch has a faster product for one matrix than for a batch of one
        return states @ weight.squeeze(0)
    return torch.einsum("bhne,hea->bhna", states, weight)


class ScoreSpec(Spec):
    """The fields of one score in YAML, and how to build it."""

    kind: str
    takes_feature: ClassVar[bool] = False
    """Whether a coverage can tell it something of the keys."""
    any_rank: ClassVar[bool] = False
    """True: it compares `[..., Q, E]` with `[..., K, E]`, whatever stands before."""
    paper: ClassVar[str] = ""

    def check(self, query_width: int, key_width: int) -> None:
        """Raise ValueError where queries and keys of these widths cannot be compared."""

    def build(self, dims: Dims) -> Score:
        """A score for queries of width dims.query_width and keys of width dims.key_width, on each of dims.heads."""
        raise unwritten(self, "build")


scores: Registry[ScoreSpec] = Registry("score", ScoreSpec, "attnbench.attention.scores")
ScoreField = Annotated[ScoreSpec, Family(lambda: scores)]
