"""The interface of a score and of its spec."""

from __future__ import annotations

from typing import Annotated, ClassVar, Protocol

from jaxtyping import Float
from torch import Tensor

from attnbench.attention.types import Dims
from attnbench.core.registry import Family, Registry
from attnbench.core.spec import Spec


class Score(Protocol):
    """A pure function, or a torch module when it has parameters."""

    def __call__(self, query: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> Float[Tensor, "B H Q K"]: ...


class ScoreSpec(Spec):
    """The fields of one score in YAML, and how to build it."""

    kind: str
    paper: ClassVar[str] = ""

    def build(self, dims: Dims) -> Score:
        raise NotImplementedError


scores: Registry[ScoreSpec] = Registry("score", ScoreSpec, "attnbench.attention.scores")
ScoreField = Annotated[ScoreSpec, Family(lambda: scores)]
