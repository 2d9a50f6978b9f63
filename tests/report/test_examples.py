from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.errors import AttnbenchError, DataError, SpecError
from attnbench.report.examples import examples_page

FILES = {
    "src": ["a", "b", "c | d", "e", "f"],
    "ref": ["A", "B", "C | D", "E", "F"],
}
OUTPUTS = {"softmax": ["A A", "B", "C C C", "E", "F"], "cs": ["A", "B B", "C", "E E E E", "F"]}
COUNTS = {"softmax": [2, 0, 4, 0, 1], "cs": [0, 2, 0, 6, 1]}


@pytest.fixture
def folder(run_folder: Callable[..., Any]) -> Path:
    run = run_folder()
    for label in ("softmax", "cs"):
        for seed in (2, 3) if label == "softmax" else (1, 2, 3):
            hyps = run.add(label, seed, 10.0) / "hyps"
            hyps.mkdir(exist_ok=True)
            files = {**FILES, "": OUTPUTS[label], "rep": [f"{count} 9" for count in COUNTS[label]]}
            for name, lines in files.items():
                path = hyps / f"test.{name}.txt".replace("..", ".")
                path.write_text("".join(f"{line} {seed}\n" if name == "" else f"{line}\n" for line in lines))
    run.add("waiting")
    run.grid()
    return run.root


def test_the_largest_differences_come_first(folder: Path):
    page = examples_page(folder, "softmax", "cs", most=1)
    assert "seed 2, test set of 5 sentences" in page  # the lowest that both have
    assert "under cs in 2 sentences, under softmax in 2" in page
    gain, loss = page.split("## Less under cs")[1].split("## Less under softmax")
    assert "Sentence 3\n" in gain
    assert "Sentence 1\n" not in gain
    assert "| source | c \\| d |\n" in gain
    assert "| reference | C \\| D |\n| softmax: 4 | C C C 2 |\n| cs: 0 | C 2 |\n" in gain
    assert "Sentence 4\n" in loss
    assert "| cs: 6 | E E E E 2 |" in loss


def test_what_is_equal_is_never_shown_and_ties_keep_their_order(folder: Path):
    page = examples_page(folder, "softmax", "cs", most=10)
    assert [line for line in page.splitlines() if line.startswith("Sentence")] == [
        f"Sentence {number}" for number in (3, 1, 4, 2)
    ]
    back = examples_page(folder, "cs", "softmax", most=10)
    assert [line for line in back.splitlines() if line.startswith("Sentence")] == [
        f"Sentence {number}" for number in (4, 2, 3, 1)
    ]
    for path in folder.rglob("test.rep.txt"):
        path.write_text("1 9\n" * 5)
    assert "Sentence" not in examples_page(folder, "softmax", "cs").replace("sentences", "")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("cs", "cs"), SpecError, "'cs' twice: name two rows"),
        (("softmacks", "cs"), SpecError, "did you mean 'softmax'"),
        (("softmax", "waiting"), DataError, "no seed is done for both 'softmax' and 'waiting'"),
    ],
)
def test_rows_that_cannot_be_compared(folder: Path, arguments: tuple[str, str], error: type[AttnbenchError], text: str):
    with pytest.raises(error, match=text):
        examples_page(folder, *arguments)


def test_absent_and_damaged_lines_are_named(folder: Path):
    with pytest.raises(SpecError, match="unknown score of sentences 'bleu'"):
        examples_page(folder, "softmax", "cs", by="bleu")
    with pytest.raises(DataError, match=r"drop\.txt.*task\.drop"):
        examples_page(folder, "softmax", "cs", by="drop")
    lines = folder / "cells" / "cs-s2" / "hyps" / "test.rep.txt"
    lines.write_text("x 9\n" * 5)
    with pytest.raises(AttnbenchError, match="a line of counts is 'x 9'"):
        examples_page(folder, "softmax", "cs")
    lines.write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"test\.rep\.txt: damaged, it is not UTF-8; run the cell with --fresh"):
        examples_page(folder, "softmax", "cs")
    lines.write_text("1 9\n" * 5)
    references = lines.with_name("test.ref.txt")
    kept = references.read_text()
    references.write_text(kept.replace("A", "Z"))
    with pytest.raises(AttnbenchError, match="different sets"):
        examples_page(folder, "softmax", "cs")
    references.write_text(kept)
    lines.write_text("1 9\n" * 4)
    with pytest.raises(AttnbenchError, match="different sets"):
        examples_page(folder, "softmax", "cs")
    (folder / "cells" / "softmax-s2" / "hyps" / "test.src.txt").unlink()
    with pytest.raises(DataError, match="run its grid again"):
        examples_page(folder, "softmax", "cs")


def test_a_task_without_such_scores_is_named(folder: Path):
    for path in folder.glob("cells/*"):
        if (path / "hyps").is_dir():
            (path / "spec.yaml").write_text("task: {kind: document}\n")
            (path / "hyps" / "test.rep.txt").unlink()
    with pytest.raises(SpecError, match="REP or DROP, which the task 'document' has not"):
        examples_page(folder, "softmax", "cs")
