"""BLEU and chrF by sacrebleu, under names that say which of the BLEUs they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from attnbench.core.spec import unknown

BleuKind = Literal["13a", "13a_lc", "tok", "tok_lc"]
"""`13a`: sacrebleu's default, on detokenised text. `tok`: the formula of multi-bleu.perl, on tokenised text as it is,
unsmoothed (0 if any precision is 0). `_lc`: both sides lower-cased first."""

BLEU_KINDS: tuple[BleuKind, ...] = get_args(BleuKind)

_SETTINGS: dict[BleuKind, dict[str, Any]] = {
    "13a": {"tokenize": "13a", "smooth_method": "exp", "lowercase": False},
    "13a_lc": {"tokenize": "13a", "smooth_method": "exp", "lowercase": True},
    "tok": {"tokenize": "none", "smooth_method": "none", "lowercase": False},
    "tok_lc": {"tokenize": "none", "smooth_method": "none", "lowercase": True},
}


class Score(NamedTuple):
    """value: 0 to 100. signature: sacrebleu's, which names every choice behind the value."""

    value: float
    signature: str


def corpus_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    kind: BleuKind = "13a",
    *,
    compound_split: bool = False,
    more: Sequence[Sequence[str]] = (),
) -> Score:
    """BLEU of a corpus.

    compound_split: see split_compounds(); done on both sides, as the papers do on tokenised En-De. more: further
    references of the same lines. Raises ValueError for an unknown kind, no lines, or sides of unequal length.
    """
    sides = [paired_lines(hypotheses, each, compound_split=compound_split) for each in (references, *more)]
    metric = bleu_metric(kind)
    score = metric.corpus_score(sides[0][0], [side for _, side in sides])
    return Score(min(score.score, 100.0), _signature(metric, compound_split))  # rounding adds a last digit


def corpus_chrf(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    more: Sequence[Sequence[str]] = (),
) -> Score:
    """chrF2 of a corpus of detokenised text (Popovic 2015). more, and what is raised: as of corpus_bleu."""
    sides = [paired_lines(hypotheses, each) for each in (references, *more)]
    metric = CHRF(lowercase=lowercase)
    return Score(metric.corpus_score(sides[0][0], [side for _, side in sides]).score, _signature(metric, False))


def kind_of(signature: str) -> BleuKind | None:
    """The kind of BLEU that gives scores of that signature; None for another metric's."""
    facts = dict(part.split(":", 1) for part in signature.split("|") if ":" in part)
    for kind, chosen in _SETTINGS.items():
        if (facts.get("tok"), facts.get("case")) == (chosen["tokenize"], "lc" if chosen["lowercase"] else "mixed"):
            return kind
    return None


def bleu_metric(kind: BleuKind, *, effective_order: bool = False) -> BLEU:
    """sacrebleu's metric of that kind.

    effective_order: for single sentences, leave out the orders that have no n-gram.
    Raises ValueError for an unknown kind.
    """
    if kind not in _SETTINGS:
        raise ValueError(unknown("BLEU", kind, BLEU_KINDS))
    # `force` only silences its warning that text looks tokenised
    return BLEU(force=True, effective_order=effective_order, **_SETTINGS[kind])


def paired_lines(
    hypotheses: Sequence[str], references: Sequence[str], *, compound_split: bool = False
) -> tuple[list[str], list[str]]:
    """Both sides as lists, checked. Raises ValueError for no lines or sides of unequal length."""
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses cannot be scored against {len(references)} references")
    if not hypotheses:
        raise ValueError("there are no lines to score")
    sides = hypotheses, references
    split = split_compounds if compound_split else str
    first, second = ([split(line) for line in side] for side in sides)
    return first, second


def split_compounds(line: str) -> str:
    """`a-b` becomes `a ##AT##-##AT## b` (the script of Tensor2Tensor for En-De), left to right, without overlap.

    `a @-@ b`, a hyphen that Moses split before, counts as one.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line.replace(" @-@ ", "-"))


def _signature(metric: BLEU | CHRF, compound_split: bool) -> str:
    signature = str(metric.get_signature())
    return f"{signature}|split:compounds" if compound_split else signature
