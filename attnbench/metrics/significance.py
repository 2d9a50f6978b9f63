"""Is one system's BLEU better than another's by more than chance? Paired bootstrap over the lines of the test set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics.bleu import BLEU

from attnbench.metrics.bleu import BleuKind, bleu_metric, prepare


def paired_bootstrap(
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    kind: BleuKind = "13a",
    samples: int = 1000,
    seed: int = 12345,
    *,
    blocks: int = 1,
    compound_split: bool = False,
) -> float:
    """p value of the difference in BLEU of two systems on the same lines, two-sided (Koehn 2004, as sacrebleu does it).

    The same `samples` draws of lines, with replacement, are scored for both. p is the share of draws whose absolute
    difference is above its mean over draws by more than the difference seen, the latter counted in:
    small where the two differ for sure. Systems of equal BLEU get 1. A function of its arguments alone.

    blocks: the lines are the same test set that many times over (the outputs of several seeds, end to end); a sentence
    is drawn with all its outputs, for they are no independent evidence.

    Raises ValueError for an unknown kind, no lines, no samples, blocks that do not divide the lines, or sides of
    unequal length.
    """
    if samples < 1:
        raise ValueError(f"a bootstrap needs at least one sample, not {samples}")
    if blocks < 1 or len(references) % blocks:
        raise ValueError(f"{len(references)} lines are not {blocks} equal blocks")
    ours, refs = prepare(system, references, compound_split=compound_split)
    theirs, _ = prepare(baseline, references, compound_split=compound_split)
    smoothing = bleu_metric(kind).smooth_method
    stats = [_statistics(side, refs, kind) for side in (ours, theirs)]
    seen = abs(_bleu(stats[0].sum(0), smoothing) - _bleu(stats[1].sum(0), smoothing))
    if seen == 0:  # the rule below would call two equal outputs, which no draw can part, surely different
        return 1.0

    lines = len(refs) // blocks
    draws = np.random.default_rng(seed).choice(lines, size=(samples, lines), replace=True)
    differences = np.empty(samples)
    for sample, draw in enumerate(draws):
        times = np.tile(np.bincount(draw, minlength=lines), blocks)
        first, second = (_bleu(times @ side, smoothing) for side in stats)
        differences[sample] = abs(first - second)
    above = np.count_nonzero(differences - differences.mean() > seen)
    return (above + 1) / (samples + 1)


def _statistics(hypotheses: list[str], references: list[str], kind: BleuKind) -> np.ndarray:
    """[lines, 10]: both lengths, then matched and total n-grams of order 1 to 4; BLEU is a function of their sums."""
    metric = bleu_metric(kind, effective_order=True)  # no say in the counts; without it each sentence brings a warning
    scores = [metric.sentence_score(ours, [right]) for ours, right in zip(hypotheses, references, strict=True)]
    return np.array([[each.sys_len, each.ref_len, *each.counts, *each.totals] for each in scores], dtype=np.int64)


def _bleu(sums: np.ndarray, smoothing: str) -> float:
    lengths, matched, total = sums[:2].tolist(), sums[2:6].tolist(), sums[6:].tolist()
    return BLEU.compute_bleu(matched, total, *lengths, smooth_method=smoothing).score
