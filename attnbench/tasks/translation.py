"""Translation of sentences: smoothed cross-entropy, BLEU in the papers' convention and in sacrebleu's, chrF, REP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from jaxtyping import Int
from pydantic import field_validator

from attnbench.data.alignment.links import words
from attnbench.data.corpus import Data
from attnbench.data.fertility import with_sink, word_aligner
from attnbench.metrics.bleu import BleuKind, Score, corpus_bleu, corpus_chrf
from attnbench.metrics.rep_drop import droppings, repetitions, share
from attnbench.models.base import Seq2SeqModel
from attnbench.tasks.base import Metrics, tasks
from attnbench.tasks.pairs import PairSpec, PairTask


@tasks.register
class TranslationSpec(PairSpec):
    """Sentence translation on a parallel corpus; every field but the scores is part of the data's recipe."""

    kind: Literal["translation"] = "translation"
    bleu: Literal["tok_lc", "tok"] = "tok_lc"
    """The score called `bleu`, on tokenised text: lower-cased (`tok_lc`) or as it is (`tok`)."""
    drop: bool = False
    """Measure the DROP-score too, with an aligner that learns from the training text and is kept with the data."""
    compound_split: bool = False
    """Score `a-b` as `a ##AT##-##AT## b` on both sides, as the papers do on En-De."""
    primary: ClassVar[str] = "test/bleu"

    @field_validator("bleu", mode="before")
    @classmethod
    def _tokenised(cls, kind: Any) -> Any:
        if kind in ("13a", "13a_lc"):
            raise ValueError(
                f"'{kind}' tokenises by itself, and this score is taken on tokenised text; write tok_lc or tok: "
                "sacrebleu's own is always measured too, as bleu_13a"
            )
        return kind

    def for_training(self, *, scored: bool) -> Self:
        whole = self.replace(drop=False)
        return whole if scored else whole.replace(bleu="tok_lc", compound_split=False)

    def bind(self) -> Translation:
        return Translation(self)


class Translation(PairTask):
    """See TranslationSpec."""

    def __init__(self, spec: TranslationSpec) -> None:
        super().__init__()
        self.spec = spec

    def adapt(self, model: Seq2SeqModel, data: Data, seed: int, *, fresh: bool) -> Data:
        if self.spec.drop:  # what cannot be kept is told before the training, not after it
            word_aligner(data, lowercase=self.spec.bleu == "tok_lc")
        return super().adapt(model, data, seed, fresh=fresh)

    def bleu(self, lines: Sequence[str], references: Sequence[str]) -> Score:
        return corpus_bleu(lines, references, self.spec.bleu, compound_split=self.spec.compound_split)

    def score(self, data: Data, split: str, lines: list[str]) -> Metrics:
        references = self.references(data, split)
        plain, raw = data.detokenize(lines), list(data.split(split).references)
        cased: BleuKind = "13a_lc" if self.spec.lowercase else "13a"
        sacre = corpus_bleu(plain, raw, cased)
        chrf = corpus_chrf(plain, raw, lowercase=self.spec.lowercase)
        scores = {"bleu": self.bleu(lines, references), "bleu_13a": sacre, "chrf": chrf}
        values = {name: score.value for name, score in scores.items()}
        values["bleu_13a_bound"] = corpus_bleu(data.detokenize(references), raw, cased).value
        signatures = {name: score.signature for name, score in scores.items()}
        lower = self.spec.bleu == "tok_lc"
        counts = repetitions(*([line.lower() if lower else line for line in side] for side in (lines, references)))
        rep = share(counts)
        if rep is not None:
            values["rep"], signatures["rep"] = rep, f"n:2|case:{'lc' if lower else 'mixed'}|tok:none"
        outputs = {"txt": lines, "detok.txt": plain, "rep.txt": _count_lines(counts)}
        if self.spec.drop:
            counts = self._dropped(data, split, lines, references, lower)
            drop = share(counts)
            outputs["drop.txt"] = _count_lines(counts)
            if drop is not None:
                values["drop"], signatures["drop"] = drop, f"aligner:ibm2|sym:gdfa|case:{'lc' if lower else 'mixed'}"
        return Metrics(values, signatures, {"sentences": len(lines)}, outputs)

    def _dropped(
        self, data: Data, split: str, lines: Sequence[str], references: Sequence[str], lower: bool
    ) -> Int[np.ndarray, "lines 2"]:
        """Of each line what `droppings` says; the sink is no word that could be dropped."""
        source = with_sink(data.split(split).source)
        aligner = word_aligner(data, lowercase=lower)
        sinks = [len(words(line)) - 1 for line in source]
        sides = (
            [[link for link in links if link[0] != sink] for links, sink in zip(found, sinks, strict=True)]
            for found in (aligner.align(source, side) for side in (lines, references))
        )
        return droppings(*sides)

    def written(self, data: Data, lines: list[str]) -> list[str]:
        return data.detokenize(lines)


def _count_lines(counts: Int[np.ndarray, "lines 2"]) -> list[str]:
    return [f"{part} {whole}" for part, whole in counts.tolist()]
