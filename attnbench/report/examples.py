"""A page of sentences on which two systems differ the most, picked by a score that counts in each line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from attnbench.core.errors import AttnbenchError, DataError, SpecError
from attnbench.core.run_files import OUTPUTS
from attnbench.core.spec import unknown
from attnbench.report.collect import Cell, Experiment, collect
from attnbench.report.formats import escape_markdown

Score = Literal["rep", "drop"]
SCORES: tuple[Score, ...] = get_args(Score)
_COUNTED = {"rep": "what an output says too often (REP)", "drop": "source words that an output leaves out (DROP)"}


@dataclass(frozen=True)
class Example:
    """One sentence. line: from 1. outputs and counts: of the first system and of the second."""

    line: int
    source: str
    reference: str
    outputs: tuple[str, str]
    counts: tuple[int, int]

    @property
    def gain(self) -> int:
        """How much less the second system's output has."""
        return self.counts[0] - self.counts[1]


def examples_page(folder: Path, first: str, second: str, *, by: str = "rep", most: int = 5) -> str:
    """Markdown: the `most` test sentences of largest gain from `first` to `second`, and those of largest loss.

    first, second: labels of cells in the run folder; their lowest common seed is shown. Of ties the earlier sentence
    comes first; sentences without a difference are never shown. Raises SpecError for a score or a label that there is
    not, DataError where no seed is done in both or a file of lines is absent.
    """
    if by not in SCORES:
        raise SpecError(unknown("score of sentences", by, SCORES))
    experiment = collect(folder)
    pair = _pair(experiment, first, second)
    found = _read(pair, by)
    gains = sorted((each for each in found if each.gain > 0), key=lambda each: -each.gain)
    losses = sorted((each for each in found if each.gain < 0), key=lambda each: each.gain)
    ours, theirs = escape_markdown(first), escape_markdown(second)
    parts = [
        f"# Examples: {ours} and {theirs}\n\n"
        f"{escape_markdown(experiment.name)}, seed {pair[0].seed}, test set of {len(found):,} sentences. Counted is "
        f"{_COUNTED[by]}: less of it under {theirs} in {len(gains)} sentences, under {ours} in {len(losses)}. Shown "
        f"are the {most} sentences that differ the most either way; of ties, the first in the set.\n"
    ]
    for title, chosen in ((f"Less under {theirs}", gains), (f"Less under {ours}", losses)):
        parts.append(f"## {title}\n")
        parts += [_shown(each, ours, theirs) for each in chosen[:most]] or ["None.\n"]
    return "\n".join(parts)


def _shown(example: Example, first: str, second: str) -> str:
    rows = {
        "source": example.source,
        "reference": example.reference,
        f"{first}: {example.counts[0]}": example.outputs[0],
        f"{second}: {example.counts[1]}": example.outputs[1],
    }
    lines = [f"| {name} | {escape_markdown(text)} |\n" for name, text in rows.items()]
    return "".join([f"Sentence {example.line}\n\n", "| | |\n| --- | --- |\n", *lines])


def _pair(experiment: Experiment, first: str, second: str) -> tuple[Cell, Cell]:
    """The cells of both labels with their lowest common seed."""
    labels = list(dict.fromkeys(cell.label for cell in experiment.cells))
    if first == second:
        raise SpecError(f"--examples '{first}' twice: name two rows, whose sentences differ")
    for label in (first, second):
        if label not in labels:
            raise SpecError(unknown("cell", label, labels))
    ours, theirs = (
        {cell.seed: cell for cell in experiment.cells if cell.label == label and cell.scored}
        for label in (first, second)
    )
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise DataError(f"{experiment.folder}: no seed is done for both '{first}' and '{second}'; run them first")
    return ours[both[0]], theirs[both[0]]


def _read(pair: tuple[Cell, Cell], by: str) -> list[Example]:
    counts = [[_first_number(line, cell) for line in _lines(cell, f"test.{by}.txt")] for cell in pair]
    texts = [[_lines(cell, f"test.{name}.txt") for name in ("src", "ref")] for cell in pair]
    outputs = [_lines(cell, "test.txt") for cell in pair]
    sources, references = texts[0]
    if texts[0] != texts[1] or len({len(lines) for lines in (sources, references, *outputs, *counts)}) != 1:
        raise AttnbenchError(f"{pair[0].folder.name} and {pair[1].folder.name} have lines of different sets")
    return [
        Example(number, source, reference, (one, two), (a, b))
        for number, (source, reference, one, two, a, b) in enumerate(
            zip(sources, references, *outputs, *counts, strict=True), start=1
        )
    ]


def _first_number(line: str, cell: Cell) -> int:
    try:
        return int(line.split()[0])
    except (ValueError, IndexError):
        raise AttnbenchError(
            f"{cell.folder / OUTPUTS}: a line of counts is '{line}'; run the cell with --fresh"
        ) from None


def _lines(cell: Cell, name: str) -> list[str]:
    path = cell.folder / OUTPUTS / name
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except ValueError:
        raise DataError(f"{path}: damaged, it is not UTF-8; run the cell with --fresh") from None
    except OSError:
        kind = (cell.spec.get("task") or {}).get("kind", "translation")
        if kind != "translation":
            raise SpecError(f"{path.parent}: examples differ in REP or DROP, which the task '{kind}' has not") from None
        if name.endswith((".src.txt", ".ref.txt")):
            mend = "run its grid again where the data are prepared: what is done is not done again"
        else:
            mend = "score it: REP is always measured, DROP with `task.drop: true`"
        raise DataError(f"{path}: there is no such file; {mend}") from None
