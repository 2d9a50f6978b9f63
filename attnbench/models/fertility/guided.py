"""Fertility by word type: the largest that training alignments show."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.models.base import Sizes, Source
from attnbench.models.fertility.base import Fertility, FertilitySpec, Lessons, Needs, fertilities


class GuidedFertility(Fertility):
    """A table of fertilities, a row of the source vocabulary each; a word never aligned has 1."""

    needs: ClassVar[Needs] = "lessons"

    def __init__(self, spec: GuidedFertilitySpec, rows: int) -> None:
        super().__init__(spec)
        self.register_buffer("table", torch.ones(rows))
        self.table: Tensor

    def forward(self, source: Source) -> Float[Tensor, "B S"]:
        return self.table[source.data]

    @torch.no_grad()
    def learn(self, train: Lessons, valid: Lessons, seed: int) -> None:
        for lesson in train:
            assert lesson.fertility is not None  # or it would be no lesson
            words = lesson.valid.to(self.table.device)
            seen = lesson.fertility.to(self.table)[words]
            self.table.scatter_reduce_(0, lesson.data.to(self.table.device)[words], seen, "amax")

    def report(self) -> dict[str, float]:
        return {"mean": self.table.mean().item()}


@fertilities.register
class GuidedFertilitySpec(FertilitySpec):
    """What a word may receive is the largest number of target words that it is aligned to in the training text."""

    kind: Literal["guided"] = "guided"
    paper: ClassVar[str] = "Malaviya et al. 2018"

    def build(self, sizes: Sizes) -> GuidedFertility:
        return GuidedFertility(self, sizes.source_vocab)
