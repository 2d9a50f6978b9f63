"""Paired tests on saved hypotheses: when there is one, and when there must be none."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from attnbench.metrics.bleu import corpus_bleu
from attnbench.metrics.significance import paired_bootstrap, paired_bootstrap_of_shares
from attnbench.report.collect import collect
from attnbench.report.rows import group
from attnbench.report.significance import PairedTests
from attnbench.report.table import render, report, write_results

WORDS = [
    "a",
    "man",
    "walks",
    "his",
    "small",
    "dog",
    "along",
    "the",
    "quiet",
    "river",
    "while",
    "two",
    "children",
    "play",
    "with",
    "an",
    "old",
    "red",
    "ball",
]


def corpus(seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(6, 14))) for _ in range(40)]


def spoil(lines: list[str], share: float, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join("x" if draw.random() < share else word for word in line.split()) for line in lines]


REFERENCES = corpus(0)
SYSTEMS = {"good": spoil(REFERENCES, 0.10, 1), "near": spoil(REFERENCES, 0.11, 2), "bad": spoil(REFERENCES, 0.5, 3)}


def bleu(lines: list[str], references: list[str] = REFERENCES) -> float:
    return corpus_bleu(lines, references, "tok_lc").value


@pytest.fixture
def run(run_folder):
    run = run_folder()
    for label, lines in SYSTEMS.items():
        run.add(label, 1, bleu(lines), lines=lines, references=REFERENCES)
    run.grid()
    return run


def p(folder: Path, other: str, metric: str = "test/bleu") -> float | None:
    rows = {row.label: row for row in group(collect(folder).cells)}
    return PairedTests(folder)(metric, rows["good"], rows[other])


def test_p_is_that_of_the_bootstrap_on_the_saved_lines(run):
    want = paired_bootstrap(SYSTEMS["good"], SYSTEMS["near"], REFERENCES, "tok_lc")
    assert p(run.root, "near") == want
    assert want > 0.05
    assert (p(run.root, "bad") or 1) < 0.05


def test_marks_follow_the_test(run):
    text = render(run.root, "md")
    assert f"**{bleu(SYSTEMS['good']):.2f} (1)**" in text
    assert f"<ins>{bleu(SYSTEMS['near']):.2f} (1)</ins>" in text
    assert f"| {bleu(SYSTEMS['bad']):.2f} (1) |" in text


def test_sentences_of_common_seeds_are_put_end_to_end(run):
    more = spoil(REFERENCES, 0.1, 9)
    for label in ("good", "near"):
        run.add(label, 2, bleu(more), lines=more, references=REFERENCES)
    run.grid()
    both = (SYSTEMS["good"] + more, SYSTEMS["near"] + more, REFERENCES * 2)
    assert p(run.root, "near") == paired_bootstrap(*both, "tok_lc", blocks=2)
    assert p(run.root, "bad") == paired_bootstrap(SYSTEMS["good"], SYSTEMS["bad"], REFERENCES, "tok_lc")


@pytest.mark.parametrize(
    "damage", ["no hypotheses", "other references", "a line short", "other text", "no references", "not UTF-8"]
)
def test_no_test_without_the_lines_that_were_scored(run, damage: str):
    hyps = run.root / "cells" / "near-s1" / "hyps"
    if damage == "no hypotheses":
        (hyps / "test.txt").unlink()
    elif damage == "no references":
        (hyps / "test.ref.txt").unlink()
    elif damage == "other references":
        (hyps / "test.ref.txt").write_text("\n".join(corpus(1)) + "\n")
    elif damage == "a line short":
        (hyps / "test.txt").write_text("\n".join(SYSTEMS["near"][:-1]) + "\n")
    elif damage == "other text":
        (hyps / "test.txt").write_text("\n".join(SYSTEMS["bad"]) + "\n")
    else:
        (hyps / "test.txt").write_bytes(b"\xff\n" * 40)
    assert p(run.root, "near") is None
    assert "<ins>" not in render(run.root, "md")


def test_documents_are_tested_as_lines_are(run):
    want = p(run.root, "near")
    for path in run.root.rglob("result.json"):
        path.write_text(path.read_text().replace('"bleu"', '"d_bleu"').replace("test/bleu", "test/d_bleu"))
    assert p(run.root, "near") is None
    assert p(run.root, "near", "test/d_bleu") == want


def test_notes_say_what_was_tested_and_what_was_read(run):
    page = render(run.root, "md")
    assert "over the sentences of common seeds" in page
    assert "the queries of 256 sentences" in page
    for path in run.root.rglob("spec.yaml"):
        path.write_text(path.read_text() + "task: {kind: document, block: 128}\n")
    page = render(run.root, "md")
    assert "over the documents of common seeds" in page
    assert "the queries of 256 blocks" in page


def test_no_test_of_what_is_no_bleu(run):
    assert p(run.root, "near", "test/chrf") is None
    assert p(run.root, "near", "valid/loss") is None


def test_tests_are_kept_with_the_run_and_forgotten_with_the_text(run):
    write_results(run.root)
    kept = json.loads((run.root / "significance.json").read_text())
    assert len(kept) == 2
    for path in run.root.glob("cells/*/hyps/*.ref.txt"):
        path.unlink()
    text = render(run.root, "md")
    assert "<ins>" in text  # a copy without the references still has its tests
    (run.root / "cells/near-s1/hyps/test.txt").write_text("\n".join(REFERENCES) + "\n")
    assert "<ins>" not in render(run.root, "md")
    shutil.rmtree(run.root / "cells" / "bad-s1")
    write_results(run.root)
    assert json.loads((run.root / "significance.json").read_text()) == {}


def test_tests_are_not_forgotten_where_the_lines_are_not_at_hand(run):
    write_results(run.root)
    before = (run.root / "significance.json").read_text()
    shutil.rmtree(run.root / "cells" / "near-s1" / "hyps")  # as where outputs are the corpus's own text
    write_results(run.root)
    assert (run.root / "significance.json").read_text() == before
    page = render(run.root, "md")
    assert (
        "not tested, for want of common seeds, of saved lines that give the scores, or of 10 lines: near (test BLEU)"
        in page
    )


@pytest.mark.parametrize("content", ["{", '{"a": null}', '{"a": "x"}'])
def test_a_damaged_memory_is_made_again(run, content):
    (run.root / "significance.json").write_text(content)
    write_results(run.root)
    assert len(json.loads((run.root / "significance.json").read_text())) == 2


@pytest.fixture
def counted(run_folder):
    """Two systems whose counts of repetitions were saved, and not their text."""
    run = run_folder()
    draw = random.Random(4)
    counts = {"good": [draw.random() < 0.1 for _ in range(60)], "much": [draw.random() < 0.6 for _ in range(60)]}
    for label, repeats in counts.items():
        folder = run.add(label, 1, 30.0, metrics={"test/rep": 100 * sum(repeats) / (60 * 9)})
        (folder / "hyps").mkdir(exist_ok=True)
        (folder / "hyps" / "test.rep.txt").write_text("".join(f"{int(each)} 9\n" for each in repeats))
    run.grid()
    return run


def test_repetitions_are_tested_on_their_saved_counts(counted):
    assert (p(counted.root, "much", "test/rep") or 1) < 0.01
    assert p(counted.root, "much", "test/drop") is None


@pytest.mark.parametrize("damage", ["1 9\n" * 59, "1 8\n" * 60, "one nine\n" * 60, "1\n" * 60])
def test_no_test_of_counts_that_do_not_give_the_score(counted, damage):
    (counted.root / "cells/much-s1/hyps/test.rep.txt").write_text(damage)
    assert p(counted.root, "much", "test/rep") is None


def test_counts_of_every_seed_must_give_its_score(counted):
    for label in ("good", "much"):
        folder = counted.add(label, 2, 30.0, metrics={"test/rep": 50.0})
        (folder / "hyps").mkdir(exist_ok=True)
        (folder / "hyps" / "test.rep.txt").write_text("1 9\n" * 60)
    counted.grid()
    assert p(counted.root, "much", "test/rep") is None


def test_where_nothing_could_be_tested_that_is_told(run):
    for path in run.root.glob("cells/*/hyps"):
        shutil.rmtree(path)
    page = render(run.root, "md")
    assert "not tested, for want of common seeds, of saved lines" in page
    assert "near (test BLEU)" in page


def test_a_seed_without_a_score_takes_no_test_away(run):
    more = {label: spoil(REFERENCES, 0.1, seed) for label, seed in (("good", 9), ("near", 8))}
    for label, lines in more.items():
        run.add(label, 2, bleu(lines), lines=lines, references=REFERENCES)
        run.add(label, 3, 0.0, weights=(), outcome={"kind": "diverged", "text": "diverged at update 5"})
    run.grid()
    both = (SYSTEMS["good"] + more["good"], SYSTEMS["near"] + more["near"], REFERENCES * 2)
    assert p(run.root, "near") == paired_bootstrap(*both, "tok_lc", blocks=2)


def test_compounds_are_tested_as_they_are_scored(run_folder):
    run, signature = run_folder(), "nrefs:1|case:lc|eff:no|tok:none|smooth:none|version:2.6.0|split:compounds"
    references = [line.replace("small dog", "small @-@ dog").replace("old red", "old-red") for line in REFERENCES]
    sides = {label: spoil(references, share, seed) for label, share, seed in (("good", 0.1, 1), ("near", 0.11, 2))}
    for label, lines in sides.items():
        score = corpus_bleu(lines, references, "tok_lc", compound_split=True).value
        run.add(label, 1, score, lines=lines, references=references, signature=signature)
    run.grid()
    want = paired_bootstrap(sides["good"], sides["near"], references, "tok_lc", compound_split=True)
    assert p(run.root, "near") == want
    assert want != paired_bootstrap(sides["good"], sides["near"], references, "tok_lc")


def test_counts_of_several_seeds_are_drawn_together(run_folder):
    run, counts = run_folder(), {}
    for label, share, start in (("good", 0.1, 0), ("much", 0.14, 10)):
        for seed in (1, 2, 3):
            draw = random.Random(start)  # the same outputs three times: no more evidence than once
            repeats = [draw.random() < share for _ in range(60)]
            folder = run.add(label, seed, 30.0, metrics={"test/rep": 100 * sum(repeats) / (60 * 9)})
            (folder / "hyps").mkdir(exist_ok=True)
            (folder / "hyps" / "test.rep.txt").write_text("".join(f"{int(each)} 9\n" for each in repeats))
            counts[label] = np.array([[int(each), 9] for each in repeats])
    run.grid()
    once = paired_bootstrap_of_shares(counts["good"], counts["much"])
    assert p(run.root, "much", "test/rep") == pytest.approx(once, abs=1e-9)
    assert 0.05 < once < 0.9


def test_a_test_of_other_references_is_none(run):
    """Each side gives its own score, by other references."""
    other = corpus(1)
    lines = spoil(other, 0.1, 5)
    run.add("elsewhere", 1, corpus_bleu(lines, other, "tok_lc").value, lines=lines, references=other)
    run.grid()
    assert p(run.root, "elsewhere") is None


def test_a_kept_test_is_of_one_signature(run):
    write_results(run.root)
    before = json.loads((run.root / "significance.json").read_text())
    for path in run.root.rglob("result.json"):
        path.write_text(path.read_text().replace("version:2.6.0", "version:9.9.9"))
    write_results(run.root)
    assert not before.keys() & json.loads((run.root / "significance.json").read_text()).keys()


def test_a_row_that_is_better_on_the_common_seeds_is_not_called_worse(run_folder):
    run = run_folder()
    sides = {1: spoil(REFERENCES, 0.4, 1), 2: spoil(REFERENCES, 0.02, 2), 3: spoil(REFERENCES, 0.02, 3)}
    other = spoil(REFERENCES, 0.15, 4)
    for seed, lines in sides.items():
        run.add("many", seed, bleu(lines), lines=lines, references=REFERENCES)
    run.add("one", 1, bleu(other), lines=other, references=REFERENCES)
    ranks = report(run.grid()).ranks
    assert ranks["many", "test/bleu"].kind == "best"
    rank = ranks["one", "test/bleu"]
    assert rank.kind == "tied"
    assert rank.p is not None
    assert rank.p < 0.05


def test_what_is_never_tested_is_named(run):
    for path in run.root.rglob("result.json"):
        path.write_text(path.read_text().replace('"metrics": {', '"metrics": {"test/chrf": 50.0, '))
    folder = run.grid({"value": ["test/bleu", "test/chrf"]})
    assert "- no test is made of test chrF: rows without a mark may be level with the best" in render(folder, "md")
    assert "no test is made" not in render(run.grid(), "md")


@pytest.mark.parametrize("kind", ["13a", "13a_lc", "tok", "tok_lc"])
def test_every_kind_of_bleu_is_tested_as_it_is_scored(run_folder, kind):
    run = run_folder()
    case, tokenizer = "lc" if kind.endswith("lc") else "mixed", "13a" if kind.startswith("13a") else "none"
    references = [line.title() + "." for line in REFERENCES]
    sides = {label: spoil(references, share, seed) for label, share, seed in (("good", 0.1, 1), ("near", 0.12, 2))}
    sides["near"] = [line.swapcase() if number % 3 else line for number, line in enumerate(sides["near"])]
    for label, lines in sides.items():
        signature = f"nrefs:1|case:{case}|eff:no|tok:{tokenizer}|smooth:exp|version:2.6.0"
        run.add(label, 1, corpus_bleu(lines, references, kind).value, lines=lines, references=references,
                signature=signature)  # fmt: skip
    run.grid()
    assert p(run.root, "near") == paired_bootstrap(sides["good"], sides["near"], references, kind)


def test_few_lines_are_not_tested(run_folder):
    for count, tested in ((9, False), (10, True)):
        run = run_folder(f"of {count}")
        for label in ("good", "bad"):
            lines, references = SYSTEMS[label][:count], REFERENCES[:count]
            run.add(label, 1, bleu(lines, references), lines=lines, references=references)
        assert (p(run.grid(), "bad") is not None) is tested


def test_other_references_are_tested_anew(run_folder):
    """Not so in a copy without them, which knows what they were."""
    found = []
    for against, references in (("old", REFERENCES), ("new", spoil(REFERENCES, 0.3, 5))):
        run = run_folder(against)
        for label in ("good", "near"):
            lines = SYSTEMS[label]
            run.add(label, 1, bleu(lines, references), lines=lines, references=references, against=against)
        if found:
            shutil.copy(found[0][0] / "significance.json", run.root)
        write_results(run.grid())
        found.append((run.root, p(run.root, "near")))
        for path in run.root.glob("cells/*/hyps/test.ref.txt"):
            path.unlink()
        assert p(run.root, "near") == found[-1][1]
    assert found[0][1] != found[1][1]
