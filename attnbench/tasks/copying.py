"""Copying of sequences: the target is the source. BLEU, and how many are reproduced without a fault."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from attnbench.core.run_files import REFERENCES
from attnbench.data.corpus import Data
from attnbench.metrics.bleu import Score, corpus_bleu
from attnbench.tasks.base import Metrics, tasks
from attnbench.tasks.pairs import PairSpec, PairTask

log = logging.getLogger("attnbench")


@tasks.register
class CopyingSpec(PairSpec):
    """Copying (Lioutas and Drozdyuk 2019; Britz, Guan and Luong 2017); every field is part of the data's recipe.

    Scores: `bleu`, corpus BLEU of the tokens as they are, unsmoothed, EOS never counted; `exact`, the percentage of
    lines reproduced exactly. A word that the vocabulary lacks comes out as `<unk>`, which is a fault: `bleu_bound` and
    `exact_bound` are the scores of a copy without any other.
    """

    kind: Literal["copying"] = "copying"
    primary: ClassVar[str] = "test/bleu"

    @model_validator(mode="after")
    def _one_language(self) -> Self:
        source, target = self.dataset.pair()
        if source != target:
            raise ValueError(
                f"dataset: '{self.dataset.kind}' is a translation from {source} to {target}; copying needs a corpus "
                "whose two sides are one, like copy, lm1b, or parallel with one language and one file twice"
            )
        return self

    def bind(self) -> Copying:
        return Copying(self)


class Copying(PairTask):
    """See CopyingSpec."""

    kept_texts = (REFERENCES,)  # the source is the same

    def __init__(self, spec: CopyingSpec) -> None:
        super().__init__()
        self.spec = spec

    def bleu(self, lines: Sequence[str], references: Sequence[str]) -> Score:
        return corpus_bleu(lines, references, "tok")

    def require_texts(self, data: Data, split: str) -> None:
        """The tokenised targets will do, which every split has."""

    def score(self, data: Data, split: str, lines: list[str]) -> Metrics:
        references = self.references(data, split)
        vocabulary = data.target_vocabulary
        known = [vocabulary.decode(vocabulary.encode(line)) for line in references]
        bleu = self.bleu(lines, references)
        values = {
            "bleu": bleu.value,
            "exact": exact(lines, references),
            "bleu_bound": self.bleu(known, references).value,
            "exact_bound": exact(known, references),
        }
        if not values["bleu_bound"]:
            log.warning(
                "%s: no reference has four known words in a row, so that BLEU is 0 whatever is copied; `exact` tells",
                split,
            )
        samples = {"sentences": len(lines)}
        return Metrics(values, {"bleu": bleu.signature}, samples, {"txt": lines})

    def written(self, data: Data, lines: list[str]) -> list[str]:
        return lines


def exact(lines: Sequence[str], references: Sequence[str]) -> float:
    """The percentage of lines that equal their reference. Raises ValueError for sides of unequal length."""
    equal = sum(line == reference for line, reference in zip(lines, references, strict=True))
    return 100 * equal / max(1, len(references))
