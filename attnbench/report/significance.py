"""Paired tests on the hypotheses that cells saved."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.core.files import write_json
from attnbench.core.run_files import OUTPUTS, TESTS, read_tests
from attnbench.report.collect import Cell
from attnbench.report.rows import Row

if TYPE_CHECKING:
    from attnbench.metrics.bleu import BleuKind

SAMPLES = 1000
RULE, OF_SEEDS = "shifted, then absolute", "the mean of seeds"
"""How p is computed, the second of several seeds: results of another rule are not kept."""
FEWEST = 10
"""Lines that a test set needs for a test: with 10 the bootstrap calls 8.5% of equal systems different at 0.05, with 5
15%, with 2 44%."""
COUNTED = ("rep", "drop")
"""Metrics whose counts of each line are saved, as hyps/test.rep.txt."""


def has_test(metric: str) -> bool:
    """Whether rows are tested on it, where the lines are at hand that give it."""
    name = metric.partition("/")[2]
    return name in COUNTED or name.removeprefix("d_").startswith("bleu")  # a line of a document task is a document


class PairedTests:
    """p of the paired bootstrap between two rows, over the sentences of their common seeds.

    They are kept in significance.json under a hash of what was tested: a table that is made again does not test again,
    and a copy without the references (they are the corpus's text) still has them.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / TESTS
        self._kept = read_tests(self.path)
        self._used: dict[str, float] = {}
        self._blind = False

    def __call__(self, metric: str, best: Row, other: Row) -> float | None:
        """None for a metric that has no test, where the saved lines are not those that gave the scores, or are fewer
        than FEWEST."""
        split, _, name = metric.partition("/")
        signature = next((cell.signatures[metric] for cell in best.done if metric in cell.signatures), "")
        if not has_test(metric):
            return None
        kind = None
        if name not in COUNTED:
            from attnbench.metrics.bleu import kind_of

            kind = kind_of(signature)
            if kind is None:
                return None
        pairs = _pairs(metric, best, other)
        ours, theirs = (_joined([pair[side] for pair in pairs], metric.replace("/", ".") if kind is None else split)
                        for side in (0, 1))  # fmt: skip
        if not ours or not theirs:
            self._blind = self._blind or bool(pairs)
            return None
        if len(ours) < FEWEST * len(pairs):
            return None
        rule = RULE if len(pairs) == 1 else f"{RULE}, {len(pairs)}, {OF_SEEDS}"
        against = dict.fromkeys(cell.references[split] for pair in pairs for cell in pair if split in cell.references)
        key = f"{metric}:{_hash(rule, signature, *ours, '', *theirs, *against)}"
        p = self._kept.get(key)
        if p is None and kind is None:
            p = _test_counts(metric, pairs, ours, theirs)
        elif p is None and kind is not None:
            p = _test(metric, pairs, ours, theirs, kind, "split:compounds" in signature)
        if p is not None:
            self._used[key] = p
        return p

    @property
    def asked(self) -> dict[str, float]:
        """The results that were asked for since this was made."""
        return dict(self._used)

    def save(self) -> None:
        """Keep what was asked for, and no other results; but all, where lines are missing by which to ask."""
        found = {**self._kept, **self._used} if self._blind else self._used
        if found != self._kept:
            write_json(self.path, found)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _pairs(metric: str, first: Row, second: Row) -> list[tuple[Cell, Cell]]:
    """The cells of both rows with the same seed; one that diverged before its first checkpoint has no score."""
    ours, theirs = ({cell.seed: cell for cell in row.done if metric in cell.metrics} for row in (first, second))
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def _joined(cells: list[Cell], name: str) -> list[str]:
    """The lines of hyps/<name>.txt of all cells, end to end; none where one has no such file."""
    lines: list[str] = []
    for cell in cells:
        found = _lines(cell, name)
        if not found:
            return []
        lines += found
    return lines


def _lines(cell: Cell, name: str) -> list[str]:
    try:
        text = (cell.folder / OUTPUTS / f"{name}.txt").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    return text.removesuffix("\n").split("\n")


def _test(
    metric: str, pairs: list[tuple[Cell, Cell]], ours: list[str], theirs: list[str], kind: BleuKind, compounds: bool
) -> float | None:
    references = f"{metric.partition('/')[0]}.ref"
    wanted, same = (_joined([pair[side] for pair in pairs], references) for side in (0, 1))
    if not wanted or wanted != same or not len(ours) == len(theirs) == len(wanted):
        return None
    if not all(_as_scored(cell, metric, kind, compounds) for pair in pairs for cell in pair):
        return None
    from attnbench.metrics.significance import paired_bootstrap

    return paired_bootstrap(ours, theirs, wanted, kind, SAMPLES, blocks=len(pairs), compound_split=compounds)


def _test_counts(metric: str, pairs: list[tuple[Cell, Cell]], ours: list[str], theirs: list[str]) -> float | None:
    from attnbench.metrics.significance import paired_bootstrap_of_shares

    first, second = _counts(ours), _counts(theirs)
    if first is None or second is None or len(first) != len(second):
        return None
    if not all(_as_counted(cell, metric) for pair in pairs for cell in pair):
        return None
    return paired_bootstrap_of_shares(first, second, SAMPLES, blocks=len(pairs))


def _counts(lines: list[str]) -> Any:
    """[lines, 2] of lines like `3 12`; None for others."""
    import numpy as np

    try:
        return np.array([[int(number) for number in line.split()] for line in lines], dtype=np.int64).reshape(-1, 2)
    except ValueError:
        return None


def _as_counted(cell: Cell, metric: str) -> bool:
    """Whether the saved counts give the cell's score again."""
    from attnbench.metrics.rep_drop import share

    counts = _counts(_lines(cell, metric.replace("/", ".")))
    found = None if counts is None else share(counts)
    return found is not None and metric in cell.metrics and abs(found - cell.metrics[metric]) < 0.005


def _as_scored(cell: Cell, metric: str, kind: BleuKind, compounds: bool) -> bool:
    """Whether the saved lines give the cell's score again; tokenised lines under a detokenised score do not."""
    from attnbench.metrics.bleu import corpus_bleu

    split = metric.partition("/")[0]
    lines, references = _lines(cell, split), _lines(cell, f"{split}.ref")
    if len(lines) != len(references) or metric not in cell.metrics:
        return False
    return abs(corpus_bleu(lines, references, kind, compound_split=compounds).value - cell.metrics[metric]) < 0.005
