"""`attnbench eval`: splits, texts and alignments of a trained cell, and what it says where that cannot be."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnbench.core.files import read_jsonl
from attnbench.experiment import evaluation
from attnbench.experiment.evaluation import load_trained, score_translations, translate
from attnbench.tasks.attention import word_attention


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept") / "runs"


@pytest.fixture
def cell(invoke, tiny, tmp_path, kept) -> Path:
    """A trained cell, and a text beside it. It is trained once, and copied."""
    (tmp_path / "s.txt").write_text("a b c\nc b\n")
    (tmp_path / "t.txt").write_text("x y\nz\n")
    (tmp_path / "gold").write_text("1-1 2p2\n1-1\n")
    if not kept.exists():
        invoke("train", "--cell", "budget-1", *tiny)
        shutil.copytree(tmp_path / "runs", kept)
    shutil.copytree(kept, tmp_path / "runs", dirs_exist_ok=True)
    (found,) = (tmp_path / "runs").glob("*/cells/*")
    return found


def test_links_and_their_error_rates(invoke, cell):
    text = ["--align", "s.txt", "t.txt"]
    lines = invoke("eval", cell, *text).stdout.splitlines()
    assert len(lines) == 2
    for line, (sources, targets) in zip(lines, [(3, 2), (2, 1)], strict=True):
        links = [tuple(map(int, link.split("-"))) for link in line.split()]
        assert len(links) <= targets  # one for each target word that does not attend to EOS alone
        assert all(source < sources and target < targets for source, target in links)
    assert json.loads(invoke("eval", cell, *text, "--json").stdout)["alignments"] == lines
    scores = json.loads(invoke("eval", cell, *text, "--gold", "gold", "--gold-first", 1, "--json").stdout)
    assert scores["pairs"] == 2
    assert all(0 <= scores[name] <= 1 for name in ("aer", "precision", "recall", "saer"))
    shown = invoke("eval", cell, *text, "--gold", "gold", "--gold-first", 1).stdout
    assert f"aer {scores['aer']:.4f}" in shown
    assert f"saer {scores['saer']:.4f}" in shown


def test_the_best_weights_are_not_silently_others(invoke, cell):
    """Of a cell that is not finished, so that nothing else says which ones were evaluated."""
    (cell / "result.json").unlink()
    newest = max(cell.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]))
    state = torch.load(newest / "state.pt", weights_only=True)
    state["train"]["best_step"] = 1
    torch.save(state, newest / "state.pt")
    assert "the best checkpoint, step 1, is gone; choose one with --step" in invoke("eval", cell, code=4).stderr


def test_text_is_read_as_training_text_is(invoke, cell, tmp_path):
    plain = invoke("eval", cell, "--input", "-", stdin="the dog sleep .\n").stdout
    (tmp_path / "marked.txt").write_bytes("\ufeffthe dog sleep .\r\n".encode())
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"the dog sleep .\n"))
    for name in ("marked.txt", "packed.gz"):
        assert invoke("eval", cell, "--input", name).stdout == plain
    assert invoke("eval", cell, "--input", "-", stdin="\ufeffthe dog sleep .").stdout == plain
    assert "nosuch: cannot be read" in invoke("eval", cell, "--input", "nosuch", code=4).stderr


def test_another_text_is_scored_against_its_references(invoke, cell, tmp_path):
    sources = ["the dog sleep .", "the cat sleep .", "the dog"]
    (tmp_path / "s.txt").write_text("".join(f"{line}\n" for line in sources))
    found = invoke("eval", cell, "--input", "s.txt").stdout.splitlines()
    texts = {"same.txt": found, "other.txt": [f"{line} yes" for line in found], "short.txt": found[:2]}
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))

    def scores(*names: str) -> dict[str, float]:
        given = [option for name in names for option in ("--reference", name)]
        told = json.loads(invoke("eval", cell, "--input", "s.txt", *given, "--json").stdout)
        assert told["translations"] == found
        assert f"nrefs:{len(names)}" in told["signatures"]["bleu_13a"]
        return told["metrics"]

    assert scores("same.txt")["chrf"] == 100.0
    assert scores("other.txt", "same.txt")["chrf"] == 100.0
    assert scores("other.txt")["chrf"] < 100.0
    assert "chrf 100.0000" in invoke("eval", cell, "--input", "s.txt", "--reference", "same.txt").stdout
    told = invoke("eval", cell, "--input", "s.txt", "--reference", "short.txt", code=4).stderr
    assert "short.txt has 2 lines, and s.txt has 3; give one for each" in told


def test_a_cell_is_a_model_in_python_too(invoke, cell):
    """As the README has it."""
    trained = load_trained(cell)
    lines = ["the dog sleep .", "the dog"]
    wanted = invoke("eval", cell, "--input", "-", stdin="".join(f"{line}\n" for line in lines)).stdout.splitlines()
    assert translate(trained, lines) == wanted
    (weights,) = word_attention(trained.model, trained.data, lines[:1], ["a b c"])
    assert weights.shape == (3, 4)


@pytest.mark.parametrize(("usable", "given", "used"), [(1, 2, 1), (8, 1, 1)])
def test_no_more_threads_are_taken_than_a_container_may_use(cell, monkeypatch, usable, given, used):
    monkeypatch.setattr(evaluation, "usable_cores", lambda: usable)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(given)
        load_trained(cell)
        assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(before)


def test_a_lower_cased_task_is_scored_lower_cased(cell):
    """Its model has seen no other letters."""
    trained = load_trained(cell)
    task = trained.spec.task.model_copy(update={"lowercase": True})
    lower = replace(trained, spec=trained.spec.model_copy(update={"task": task}))
    scores, cased = (
        score_translations(each, ["the dog sleeps now"], [["The Dog sleeps NOW"]]) for each in (lower, trained)
    )
    assert scores.values == {"bleu_13a": 100.0, "chrf": 100.0}
    assert max(cased.values.values()) < 100.0
    assert all("case:lc" in signature for signature in scores.signatures.values())


def test_nothing_is_said_of_an_empty_line(invoke, cell):
    lines = invoke("eval", cell, "--input", "-", stdin="the dog\n\n  \nthe dog\n").stdout.split("\n")
    assert lines[0] == lines[3] != ""
    assert lines[1:3] == ["", ""]
    assert invoke("eval", cell, "--input", "-", stdin="\n").stdout == "\n"


def test_the_training_split_cannot_be_scored(invoke, cell, monkeypatch):
    monkeypatch.setattr("attnbench.tasks.pairs.PairTask.decode", lambda *given, **named: pytest.fail("it was decoded"))
    assert "keeps no untokenised references to score" in invoke("eval", cell, "--split", "train", code=4).stderr


def test_a_result_without_its_checkpoints_says_why(invoke, cell):
    shutil.rmtree(cell / "checkpoints")
    assert "the result came from another table, or they were removed" in invoke("eval", cell, code=4).stderr


def test_where_the_same_run_was_trained_is_named(invoke, cell, tmp_path, monkeypatch):
    """A result taken over from another table has no checkpoints."""
    for name in ("group/other", "other"):
        taken = tmp_path / "runs" / name / "cells" / cell.name
        shutil.copytree(cell, taken, ignore=shutil.ignore_patterns("checkpoints"))
        told = invoke("eval", taken, code=4).stderr
        assert f"the same run was trained for another table; name {cell.relative_to(tmp_path)}\n" in told
        monkeypatch.chdir(taken)
        assert f"name {cell}\n" in invoke("eval", taken, code=4).stderr
        monkeypatch.chdir(tmp_path)
    assert "test/bleu" in invoke("eval", told.split("name ")[1].strip()).stdout
    for field, value in (("digest", cell.name[-8:] + "0000"), ("data", {"content_sha256": "0"})):
        result = json.loads((taken / "result.json").read_text())
        (cell / "result.json").write_text(json.dumps({**result, field: value}))  # not the same run after all
        assert "or they were removed" in invoke("eval", taken, code=4).stderr
    (cell / "result.json").unlink()  # nor one that goes on
    assert "or they were removed" in invoke("eval", taken, code=4).stderr


def test_a_line_that_is_too_long_is_named(invoke, cell):
    told = invoke("eval", cell, "--input", "-", stdin="the dog\n" + "dog " * 3000 + "\n", code=2).stderr
    assert "line 2 has 3001 tokens" in told
    assert "--set model.max_length=N" in told


def test_another_model_is_the_option_s_fault(invoke, cell):
    told = invoke("eval", cell, "--set", "model.layers=3", code=2).stderr
    assert "--set model.layers=3: makes another model than was trained" in told
    assert "remove" not in told


def test_what_it_says_of_data_that_are_gone_helps(invoke, cell, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "another"))
    for options in (["--set", "task.tokenizer={kind: word, joint: true}"], ["--set", "task.dataset.pairs=70"]):
        told = invoke("eval", cell, *options, code=2).stderr  # and not to prepare what would not do
        assert "names other data than the cell was trained with; to score another text, give --input" in told
    told = invoke("eval", cell, "--set", "task.bleu=tok", code=4).stderr
    assert shlex.split(told.split("run attnbench ")[1])[-2:] == ["--set", "task.bleu=tok"]
    invoke(*shlex.split(invoke("eval", cell, code=4).stderr.split("run attnbench ")[1]))
    assert "test/bleu" in invoke("eval", cell).stdout


@pytest.mark.parametrize(("override", "words"), [
    ("seed=4", "changes nothing, the cell is trained"),
    ("train.max_steps=9", "changes nothing, the cell is trained"),
    ("train={max_steps: 9}", "changes nothing, the cell is trained"),
    ("timing.decode_runs=2", "changes nothing, eval times no decoding"),
    ("model.attention.default.budget=2", "name the sites, like model.attention.cross.budget=..."),
    ("model.attention.default=softmax", "name the sites, like model.attention.cross=..."),
])  # fmt: skip
def test_what_would_change_nothing_is_told(invoke, cell, override, words):
    assert words in invoke("eval", cell, "--set", override, code=2).stderr


def test_weights_are_averaged_as_asked_whatever_was_scored(invoke, cell):
    def scored(*options):
        return json.loads(invoke("eval", cell, "--json", *options).stdout)["steps"]

    steps = sorted(int(path.name.removeprefix("step-")) for path in cell.glob("checkpoints/step-*"))
    assert len(steps) > 1
    result = json.loads((cell / "result.json").read_text())
    assert scored() == result["weights"] == [result["metrics"]["best/step"]]
    assert scored("--set", "train.average=1") == result["weights"]
    last = sorted(line["step"] for line in read_jsonl(cell / "metrics.jsonl") if "valid/loss" in line)
    assert scored("--set", "train.average=2") == last[-2:]
    averaged = {**result, "weights": steps[:2]}
    (cell / "spec.yaml").write_text((cell / "spec.yaml").read_text().replace("average: 1", "average: 2"))
    (cell / "result.json").write_text(json.dumps(averaged))
    assert scored() == steps[:2]  # whatever was validated last
    assert scored("--set", "train.average=1") == [result["metrics"]["best/step"]]
    (cell / "result.json").write_text(json.dumps({**result, "weights": steps[:1]}))
    assert scored() == steps[:1]
    shutil.rmtree(cell / "checkpoints" / f"step-{last[-2]}")
    told = invoke("eval", cell, "--set", "train.average=2", code=2).stderr
    assert f"of the last 2 validations, steps {last[-2]}, {last[-1]}, not all have their checkpoint still" in told
    told = invoke("eval", cell, "--set", "train.average=2", "--step", steps[0], code=2).stderr
    assert f"--step {steps[0]} and --set train.average=2 exclude each other" in told


def test_a_state_that_was_not_copied_is_named(invoke, cell):
    (cell / "result.json").unlink()
    for state in cell.glob("checkpoints/*/state.pt"):
        state.unlink()
    assert (
        "state.pt is gone, which tells the best checkpoint; choose one with --step"
        in invoke("eval", cell, code=4).stderr
    )


@pytest.mark.parametrize(("given", "told"), [
    ("search.size=1", None), ("search.penalty={kind: wu, alpha: 0.6}", "search.penalty"),
    ("search.penalty.alpha=0.7", "search.penalty"),
])  # fmt: skip
def test_what_changes_nothing_is_told(given, told, invoke, cell):
    wu = ("--set", "search.kind=beam", "--set", "search.size=1", "--set", "search.penalty={kind: wu, alpha: 0.6}")
    said = invoke("eval", cell, "--split", "valid", *wu, "--set", given).stderr
    assert (f"--set {given}: " in said) == (told is not None)
    if told:
        assert f"--set {given}: {told} changes nothing: a beam of size 1 has nothing to rank" in said


@pytest.mark.parametrize("content", [b"", b"PK"])
def test_a_damaged_state_is_named(invoke, cell, content):
    (cell / "result.json").unlink()
    state = max(cell.glob("checkpoints/*/state.pt"), key=lambda path: int(path.parent.name.removeprefix("step-")))
    state.write_bytes(content)
    found = invoke("eval", cell, code=4).stderr
    assert str(state) in found
    assert "choose a checkpoint with --step" in found


@pytest.mark.parametrize("content", ["", "{", "\u00ff"])
def test_a_damaged_result_is_named(invoke, cell, content):
    (cell / "result.json").write_text(content, encoding="latin-1")
    assert "result.json is damaged: delete it and run the cell again" in invoke("eval", cell, code=1).stderr


@pytest.mark.parametrize(("options", "words"), [
    (["--gold", "gold"], "--align SOURCE TARGET"),
    (["--reference", "s.txt"], "Name its source with --input"),
    (["--align", "s.txt", "t.txt", "--input", "s.txt"], "--align and --input exclude each other"),
    (["--align", "s.txt", "t.txt", "--split", "valid"], "--align and --split exclude each other"),
    (["--input", "s.txt", "--split", "test"], "--input and --split exclude each other"),
    (["--align", "s.txt", "t.txt", "--gold-first", "1"], "name them with --gold"),
    (["--align", "s.txt", "gold", "--gold", "t.txt"], "t.txt:1: 'x' is no link"),
    (["--align", "s.txt", "absent"], "absent"),
    (["--align", "s.txt", "t.txt", "--set", "search.size=9"], "changes nothing, --align searches for no output"),
    (["--split", "tset"], "unknown split 'tset'; did you mean 'test'?"),
])  # fmt: skip
def test_what_cannot_be_is_told(invoke, cell, options, words):
    result = invoke("eval", cell, *options, code=4 if "absent" in options or "t.txt" in options[-1:] else 2)
    assert words in result.stderr
