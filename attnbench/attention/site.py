"""A site: the stages of the pipeline that stand between queries and keys."""

from __future__ import annotations

from typing import Literal, NamedTuple

from attnbench.attention.biases.base import BiasSpec
from attnbench.attention.coverage.base import CoverageSpec
from attnbench.attention.patterns.base import PatternSpec
from attnbench.attention.scores.base import ScoreSpec
from attnbench.attention.transforms.base import TransformSpec
from attnbench.attention.types import Backend

Stage = Literal["score", "coverage", "bias", "pattern", "transform"]


class Site(NamedTuple):
    """The stages one module is built from. sparsify `train`: in eval mode softmax takes the transform's place."""

    score: ScoreSpec
    pattern: PatternSpec
    transform: TransformSpec
    sparsify: Literal["train", "both"] = "both"
    bias: BiasSpec | None = None
    coverage: CoverageSpec | None = None
    backend: Backend = "auto"

    @property
    def spends(self) -> bool:
        """Whether it must know what each key may still receive."""
        return self.transform.needs_upper or (self.bias is not None and self.bias.needs_upper)
