"""Copies for committing: what goes in, what stays out, and what is never overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import attnbench
from attnbench.core.errors import AttnbenchError, DataError, SpecError
from attnbench.report.collect import collect
from attnbench.report.save import save
from attnbench.report.table import render


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_everything_but_checkpoints_locks_and_references(sweep, tmp_path: Path):
    cell = sweep.add("topk-4", 1, 34.0, lines=["a"], references=["b"])
    for name in ("checkpoints/step-1/model.safetensors", "lock", ".result.json.x", "metrics.jsonl"):
        (cell / name).parent.mkdir(parents=True, exist_ok=True)
        (cell / name).write_text("{}\n")
    (sweep.root / "spec.yaml").parent.mkdir(exist_ok=True)
    folder = sweep.grid()
    (folder / "spec.yaml").write_text("name: demo\n")
    target = save(folder, tmp_path / "results")
    assert target == tmp_path / "results" / "demo"
    found = files(target)
    assert {"grid.json", "spec.yaml", "results.md", "results.json", "results.csv", "results.tex"} <= found
    assert {name for name in found if name.startswith("cells/topk-4-s1/")} == {
        f"cells/topk-4-s1/{name}" for name in ("result.json", "spec.yaml", "env.json", "metrics.jsonl", "hyps/test.txt")
    }
    assert "cells/topk-8-s3/error.txt" in found
    assert render(target, "md") == render(folder, "md")


@pytest.mark.parametrize(("task", "kept"), [
    ("{kind: copying, dataset: {kind: lm1b}}", False), ("{kind: copying, dataset: {kind: copy}}", True),
    ("{kind: translation, dataset: {kind: lm1b}}", True),
])  # fmt: skip
def test_outputs_that_are_a_corpus_again_are_left_out(run_folder, tmp_path: Path, task: str, kept: bool):
    run = run_folder("copies")
    cell = run.add("a", 1, 34.0, lines=["the text itself"], references=["the text itself"])
    (cell / "spec.yaml").write_text(f"task: {task}\n")
    found = files(save(run.grid(), tmp_path / "results"))
    assert ("cells/a-s1/hyps/test.txt" in found) == kept
    assert "cells/a-s1/result.json" in found
    assert (cell / "hyps" / "test.txt").exists()


def test_saving_again_changes_nothing(sweep, tmp_path: Path):
    folder = sweep.grid()
    target = save(folder, tmp_path / "results")
    before = {name: (target / name).read_bytes() for name in files(target)}
    save(folder, tmp_path / "results")
    assert {name: (target / name).read_bytes() for name in files(target)} == before


def test_a_long_table_grows_over_several_machines(run_folder, tmp_path: Path):
    first = run_folder("one")
    first.add("dense", 1, 35.0)
    first.add("topk-8", 1)
    save(first.grid(), tmp_path / "results")
    second = run_folder("two")
    second.add("topk-8", 1, 35.5)
    second.add("topk-16", 1, 35.25)
    target = save(second.grid(), tmp_path / "results")
    assert [(cell.label, cell.status) for cell in collect(target).cells] == [
        ("dense", "done"),
        ("topk-8", "done"),
        ("topk-16", "done"),
    ]
    third = run_folder("three")
    third.add("dense", 1)
    save(third.grid(), tmp_path / "results")
    assert collect(target).cells[0].status == "done"


def test_a_copy_names_no_place_of_this_machine(run_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for number, (source, kept) in enumerate(
        {
            f"{tmp_path}/experiments/x.yaml": "experiments/x.yaml",
            "/elsewhere/x.yaml": "x.yaml",
            str(Path(attnbench.__file__).parent / "specs" / "demo.yaml"): "attnbench/specs/demo.yaml",
            "x.yaml": "x.yaml",
        }.items()
    ):
        run = run_folder(f"run{number}", name=f"run{number}")
        run.add("dense", 1, 35.0)
        copy = save(run.grid(source=source), tmp_path / "results")
        assert json.loads((copy / "grid.json").read_text())["source"] == kept


@pytest.mark.parametrize(("given", "kept"), [
    ("--runs /elsewhere/runs --jobs 2", "--jobs 2"),
    ("--jobs 2 '--runs=/my runs'", "--jobs 2"),
    ("--runs '/my runs' --jobs 2", "--jobs 2"),
    ("--from /data/multi30k --jobs 2", "--from DIR --jobs 2"),
    ("--jobs 2 '--from=/my data'", "--jobs 2 --from DIR"),
    ("--from '/my data' --jobs 2", "--from DIR --jobs 2"),
    ("--from data --jobs 2", "--from data --jobs 2"),
])  # fmt: skip
def test_a_copy_does_not_say_where_runs_and_corpora_lay(run_folder, tmp_path: Path, given: str, kept: str):
    run = run_folder("run")
    run.add("dense", 1, 35.0)
    folder = run.grid()
    file = folder / "grid.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "command": f"attnbench ablate x.yaml {given}"}))
    copy = save(folder, tmp_path / "results")
    assert json.loads((copy / "grid.json").read_text())["command"] == f"attnbench ablate x.yaml {kept}"


@pytest.mark.parametrize("here", [False, True])
def test_a_run_folder_is_not_saved_over_itself(run_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool):
    run = run_folder("runs/demo")
    (run.add("dense", 1, 35.0) / "checkpoints").mkdir()
    folder = run.grid()
    before = files(folder)
    monkeypatch.chdir(folder if here else tmp_path)
    with pytest.raises(SpecError, match="the run folder is there, or in it"):
        save(folder, Path("..") if here else folder.parent)
    assert files(folder) == before


@pytest.mark.parametrize("into", [".", "cells", "results/of/mine"])
def test_a_copy_does_not_lie_in_its_run_folder(run_folder, tmp_path: Path, into: str):
    run = run_folder("runs/other")
    run.add("dense", 1, 35.0)
    folder = run.grid()
    (tmp_path / "link").symlink_to(folder)
    before = files(folder)
    for at in (folder, tmp_path / "link"):
        with pytest.raises(SpecError, match="demo: this is in the run folder; save to a place outside of it"):
            save(folder, at / into)
    assert files(folder) == before


def test_a_folder_that_is_no_copy_is_not_replaced(run_folder, tmp_path: Path):
    run = run_folder()
    run.add("dense", 1, 35.0)
    (tmp_path / "home" / "demo" / "thesis").mkdir(parents=True)
    (tmp_path / "home" / "demo" / "thesis" / "chapter.tex").touch()
    with pytest.raises(SpecError, match=r"home/demo: is there, and holds no grid\.json"):
        save(run.grid(), tmp_path / "home")
    assert (tmp_path / "home" / "demo" / "thesis" / "chapter.tex").exists()
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "demo").touch()
    with pytest.raises(SpecError, match="holds no grid"):
        save(run.grid(), tmp_path / "file")
    (tmp_path / "empty" / "demo").mkdir(parents=True)
    assert "grid.json" in files(save(run.grid(), tmp_path / "empty"))


def test_what_people_put_beside_a_copy_stays_and_a_link_stays_one(run_folder, tmp_path: Path):
    run = run_folder()
    run.add("dense", 1, 35.0)
    (tmp_path / "results").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "results" / "demo").symlink_to(tmp_path / "elsewhere")
    target = save(run.grid(), tmp_path / "results")
    (target / "README.md").write_text("by hand")
    (target / "plots").mkdir()
    (target / "plots" / "a.png").touch()
    run.add("topk-8", 1, 36.0)
    target = save(run.grid(), tmp_path / "results")
    assert target.is_symlink()
    assert (target / "README.md").read_text() == "by hand"
    assert (target / "plots" / "a.png").exists()
    assert len(collect(target).cells) == 2


def test_tests_that_a_copy_has_are_kept_when_cells_join_it(run_folder, tmp_path: Path):
    first, second = run_folder("one"), run_folder("two")
    first.add("dense", 1, 35.0)
    second.add("topk-8", 1, 36.0)
    target = save(first.grid(), tmp_path / "results")
    (target / "significance.json").write_text('{"test/bleu:0123456789abcdef": 0.25}')
    save(second.grid(), tmp_path / "results")
    assert json.loads((target / "significance.json").read_text()) == {"test/bleu:0123456789abcdef": 0.25}


def test_a_different_result_is_never_overwritten(run_folder, tmp_path: Path):
    first, second = run_folder("one"), run_folder("two")
    first.add("dense", 1, 35.0)
    second.add("dense", 1, 36.0)
    target = save(first.grid(), tmp_path / "results")
    with pytest.raises(AttnbenchError, match=r"dense-s1/result\.json holds a different result"):
        save(second.grid(), tmp_path / "results")
    assert json.loads((target / "results.json").read_text())["results"]["dense"]["test/bleu"] == 35.0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["demo"]


def test_two_experiments_never_share_a_copy(run_folder, tmp_path: Path):
    first, second = run_folder("one", name="a/demo"), run_folder("two", name="b/demo")
    save(first.grid(), tmp_path / "results")
    with pytest.raises(AttnbenchError, match="holds another experiment, a/demo"):
        save(second.grid(), tmp_path / "results")


def test_what_cannot_share_a_table_is_not_saved(run_folder, tmp_path: Path):
    first, second = run_folder("one"), run_folder("two")
    first.add("dense", 1, 35.0)
    second.add("topk-8", 1, 36.0, data="bbbbbbbbbbbb")
    target = save(first.grid(), tmp_path / "results")
    before = files(target)
    with pytest.raises(AttnbenchError, match="cannot share a table"):
        save(second.grid(), tmp_path / "results")
    assert files(target) == before


def test_no_run_folder(tmp_path: Path):
    with pytest.raises(DataError, match=r"no grid\.json"):
        save(tmp_path, tmp_path / "results")


def test_a_place_that_cannot_be_made_is_told(run_folder, tmp_path: Path):
    run = run_folder()
    run.add("dense", 1, 35.0)
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"file/in: it cannot be made \(Not a directory\); name another place"):
        save(run.grid(), tmp_path / "file" / "in")
