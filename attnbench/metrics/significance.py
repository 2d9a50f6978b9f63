"""Is one system's score better than another's by more than chance? Paired bootstrap over the lines of the test set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int
from sacrebleu.metrics.bleu import BLEU

from attnbench.metrics.bleu import BleuKind, bleu_metric, prepare
from attnbench.metrics.coverage import share

SEED = 12345


def paired_bootstrap(
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    kind: BleuKind = "13a",
    samples: int = 1000,
    seed: int = SEED,
    *,
    blocks: int = 1,
    compound_split: bool = False,
) -> float:
    """p value of the difference in BLEU of two systems on the same lines: `bootstrap` of their counts of n-grams.

    Raises ValueError for an unknown kind, no lines, no samples, blocks that do not divide the lines, or sides of
    unequal length.
    """
    ours, refs = prepare(system, references, compound_split=compound_split)
    theirs, _ = prepare(baseline, references, compound_split=compound_split)
    smoothing = bleu_metric(kind).smooth_method
    first, second = (_statistics(side, refs, kind) for side in (ours, theirs))
    return bootstrap(first, second, lambda sums: _bleu(sums, smoothing), samples, seed, blocks=blocks)


def paired_bootstrap_of_shares(
    system: Int[np.ndarray, "lines 2"],
    baseline: Int[np.ndarray, "lines 2"],
    samples: int = 1000,
    seed: int = SEED,
    *,
    blocks: int = 1,
) -> float:
    """p value of the difference in REP or DROP of two systems, whose counts of each line are given (metrics.coverage).

    Raises ValueError as `bootstrap` does.
    """
    return bootstrap(system, baseline, lambda sums: share(sums[None]) or 0.0, samples, seed, blocks=blocks)


def bootstrap(
    system: Int[np.ndarray, "lines n"],
    baseline: Int[np.ndarray, "lines n"],
    score: Callable[[Int[np.ndarray, "n"]], float],
    samples: int,
    seed: int,
    *,
    blocks: int = 1,
) -> float:
    """p value of the difference of two systems in a score that is a function of sums over the same lines, two-sided
    (Koehn 2004, as sacrebleu does it).

    The same `samples` draws of lines, with replacement, are scored for both. p is the share of draws whose absolute
    difference is above its mean over draws by more than the difference seen, the latter counted in:
    small where the two differ for sure. Systems of equal scores get 1. A function of its arguments alone.

    blocks: the lines are the same test set that many times over (the outputs of several seeds, end to end); a sentence
    is drawn with all its outputs, for they are no independent evidence.

    Raises ValueError for no lines, no samples, blocks that do not divide the lines, or sides of unequal shape.
    """
    if samples < 1:
        raise ValueError(f"a bootstrap needs at least one sample, not {samples}")
    if system.shape != baseline.shape:
        raise ValueError(f"counts of {len(system)} lines cannot be paired with those of {len(baseline)}")
    if not len(system):
        raise ValueError("there are no lines to score")
    if blocks < 1 or len(system) % blocks:
        raise ValueError(f"{len(system)} lines are not {blocks} equal blocks")
    seen = abs(score(system.sum(0)) - score(baseline.sum(0)))
    if seen == 0:  # the rule below would call two equal outputs, which no draw can part, surely different
        return 1.0

    lines = len(system) // blocks
    draws = np.random.default_rng(seed).choice(lines, size=(samples, lines), replace=True)
    differences = np.empty(samples)
    for sample, draw in enumerate(draws):
        times = np.tile(np.bincount(draw, minlength=lines), blocks)
        differences[sample] = abs(score(times @ system) - score(times @ baseline))
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
