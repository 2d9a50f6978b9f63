"""Is one system's score better than another's by more than chance? Paired bootstrap over the lines of the test set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
from jaxtyping import Int
from sacrebleu.metrics.bleu import BLEU

from attnbench.metrics.bleu import BleuKind, bleu_metric, paired_lines
from attnbench.metrics.rep_drop import share

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
    ours, refs = paired_lines(system, references, compound_split=compound_split)
    theirs, _ = paired_lines(baseline, references, compound_split=compound_split)
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
    """p value of the difference in REP or DROP of two systems, whose counts of each line are given (metrics.rep_drop).

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
    (draws as in Koehn 2004; the test by the shift method of Noreen 1989, Computer-Intensive Methods).

    The same `samples` draws of lines, with replacement, are scored for both. p is the share of draws whose difference
    lies further from its mean over draws than the difference seen is from none, the latter counted in: small where the
    two differ for sure. Systems of equal scores get 1. A function of its arguments alone.

    sacrebleu (and Moses) take the absolute value before the mean is taken away, which finds 8 to 13% of equal systems
    different where p < 0.05 should find 5%; here it is 4 to 7% of 100 lines (tests/metrics/test_significance.py draws
    such pairs), and more of fewer: 8.5% of 10.

    blocks: the lines are the same test set that many times over (the outputs of several seeds, end to end). What is
    tested is the mean of the blocks' scores, as tables show it; a sentence is drawn with all its outputs, for they are
    no independent evidence.

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
    lines = len(system) // blocks

    def difference(times: Int[np.ndarray, "lines"]) -> float:
        ours, theirs = (
            fmean(score(times @ block) for block in side.reshape(blocks, lines, -1)) for side in (system, baseline)
        )
        return ours - theirs

    seen = abs(difference(np.ones(lines, np.int64)))
    if seen == 0:  # the rule below would call two equal outputs, which no draw can part, surely different
        return 1.0

    draws = np.random.default_rng(seed).choice(lines, size=(samples, lines), replace=True)
    differences = np.array([difference(np.bincount(draw, minlength=lines)) for draw in draws])
    beyond = np.count_nonzero(np.abs(differences - differences.mean()) > seen)
    return float((beyond + 1) / (samples + 1))


def _statistics(hypotheses: list[str], references: list[str], kind: BleuKind) -> np.ndarray:
    """[lines, 10]: both lengths, then matched and total n-grams of order 1 to 4; BLEU is a function of their sums."""
    metric = bleu_metric(kind, effective_order=True)  # no say in the counts; without it each sentence brings a warning
    scores = [metric.sentence_score(ours, [right]) for ours, right in zip(hypotheses, references, strict=True)]
    return np.array([[each.sys_len, each.ref_len, *each.counts, *each.totals] for each in scores], dtype=np.int64)


def _bleu(sums: np.ndarray, smoothing: str) -> float:
    lengths, matched, total = sums[:2].tolist(), sums[2:6].tolist(), sums[6:].tolist()
    return BLEU.compute_bleu(matched, total, *lengths, smooth_method=smoothing).score
