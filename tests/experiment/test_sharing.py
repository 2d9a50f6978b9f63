from __future__ import annotations

import itertools
import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.contention import Shared
from attnbench.core.files import read_jsonl
from attnbench.core.lock import locked
from attnbench.experiment import pipeline, sharing
from attnbench.experiment.executor import Processes, attempt
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import Place
from attnbench.experiment.sharing import training_digest

ONE_BUDGET = {"model.attention.default.budget": [1]}
BEAMS = {
    "grid": {"axes": {**ONE_BUDGET, "search": [{"kind": "greedy"}, {"label": "beam", "kind": "beam", "size": 2}]}},
}


def taken(folder: Path) -> list[str]:
    lines = read_jsonl(folder / "metrics.jsonl")
    return [line["event"] for line in lines if line.get("event", "").startswith("trained as")]


def trained(folder: Path) -> list[int]:
    return [line["step"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]


@pytest.mark.parametrize("jobs", [1, 2])
def test_cells_that_differ_in_search_alone_train_once(bench: Any, jobs: int):
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    assert [outcome.error for outcome in bench.run(experiment, jobs=jobs)] == [None, None]
    first, second = (bench.cell(experiment, index) for index in range(2))
    assert taken(first) == []
    assert taken(second) == [f"trained as {first.name}"]
    assert trained(first) == trained(second) == [1, 2, 3, 4]
    for name in ("model.safetensors", "state.pt"):
        one, two = (folder / "checkpoints" / "step-4" / name for folder in (first, second))
        assert one.read_bytes() == two.read_bytes()
    alone = bench.experiment({**BEAMS, "name": "alone"})
    assert [outcome.error for outcome in bench.run(alone, fresh=True)] == [None, None]
    for index, folder in enumerate((first, second)):
        own = bench.cell(alone, index)
        assert taken(own) == []
        assert (own / "hyps" / "test.txt").read_bytes() == (folder / "hyps" / "test.txt").read_bytes()
    found = json.loads((second / "result.json").read_text())["metrics"]
    assert found["train/tokens"] == json.loads((first / "result.json").read_text())["metrics"]["train/tokens"]


def test_a_training_that_is_borrowed_counts_in_no_seconds_of_the_borrower(bench: Any, monkeypatch: pytest.MonkeyPatch):
    looks = itertools.count()
    busy = type("Busy", (), {"seconds": property(lambda _: 1000.0 * next(looks))})()
    met = iter([busy, Shared(7.0)])
    monkeypatch.setattr(pipeline, "relieved", lambda *_: nullcontext(next(met)))
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    bench.run(experiment, jobs=1)
    first, second = (json.loads((bench.cell(experiment, index) / "result.json").read_text()) for index in range(2))
    assert first["shared_seconds"] > 1000
    assert second["shared_seconds"] == 7


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"search": {"kind": "beam", "size": 3}}, True),
        ({"timing": {"decode_runs": 1}}, True),
        ({"seed": 2}, False),
        ({"train": {"max_steps": 5}}, False),
        ({"model": {"dropout": 0.35}}, False),
        ({"task": {"bleu": "tok"}}, True),
        ({"task": {"drop": True, "compound_split": True}}, True),
        ({"task": {"drop": True}, "train": {"validate_bleu": True}}, False),
    ],
)
def test_what_a_training_depends_on(bench: Any, changes: dict[str, Any], same: bool):
    grid = {"grid": {"axes": ONE_BUDGET}}
    (plain,), (other,) = bench.experiment(grid).cells, bench.experiment({**grid, **changes}).cells
    assert plain.digest != other.digest
    assert (training_digest(plain.spec) == training_digest(other.spec)) == same


@pytest.mark.parametrize(
    "what", ["unfinished", "damaged", "other data", "no checkpoints", "no best weights", "diverged", "odd spec"]
)
def test_a_training_that_is_not_whole_is_not_taken(bench: Any, what: str):
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    cells = experiment.cells
    root = bench.runs / experiment.name
    place = Place(bench.cache)
    assert attempt(root, cells[0], place, False, lambda record: None).error is None
    folder = bench.cell(experiment, 0)
    result = folder / "result.json"
    if what == "unfinished":
        result.unlink()
    elif what == "damaged":
        result.write_text("{")
    elif what == "other data":
        content = json.loads(result.read_text())
        result.write_text(json.dumps({**content, "data": {"content_sha256": "0"}}))
    elif what == "diverged":
        content = json.loads(result.read_text())
        result.write_text(json.dumps({**content, "outcome": {**content["outcome"], "kind": "diverged"}}))
    elif what == "no best weights":
        (best,) = json.loads(result.read_text())["weights"]
        (folder / "checkpoints" / f"step-{best}").rename(folder / "gone")
    elif what == "no checkpoints":
        (folder / "checkpoints").rename(folder / "gone")
    else:
        (folder / "spec.yaml").write_text("task: [")
    assert attempt(root, cells[1], place, False, lambda record: None).error is None
    second = bench.cell(experiment, 1)
    assert taken(second) == []
    assert trained(second) == [1, 2, 3, 4]


def test_a_training_that_another_copies_is_waited_for(bench: Any):
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    root, place = bench.runs / experiment.name, Place(bench.cache)
    assert attempt(root, experiment.cells[0], place, False, lambda record: None).error is None
    folder = bench.cell(experiment, 0)
    holding = locked(folder / "lock")
    holding.__enter__()
    release = threading.Timer(1.5, holding.__exit__, (None, None, None))
    release.start()
    assert attempt(root, experiment.cells[1], place, False, lambda record: None).error is None
    release.join()
    assert taken(bench.cell(experiment, 1)) == [f"trained as {folder.name}"]


def test_the_seconds_of_a_training_are_counted_once(bench: Any):
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    root, place = bench.runs / experiment.name, Place(bench.cache)
    assert attempt(root, experiment.cells[0], place, False, lambda record: None).error is None
    path = bench.cell(experiment, 0) / "result.json"
    result = json.loads(path.read_text())
    result["metrics"]["train/seconds"] += 1000  # as if it had taken so long: they are taken off the taker's
    path.write_text(json.dumps(result))
    assert attempt(root, experiment.cells[1], place, False, lambda record: None).error is None
    assert json.loads((bench.cell(experiment, 1) / "result.json").read_text())["total_seconds"] < -900


def test_the_seconds_of_a_training_are_its_makers_though_the_taker_is_cut_off(
    bench: Any, monkeypatch: pytest.MonkeyPatch
):
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    root, place = bench.runs / experiment.name, Place(bench.cache)
    assert attempt(root, experiment.cells[0], place, False, lambda record: None).error is None
    path = bench.cell(experiment, 0) / "result.json"
    result = json.loads(path.read_text())
    result["metrics"]["train/seconds"] += 1000
    path.write_text(json.dumps(result))
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "evaluate", lambda *given: (_ for _ in ()).throw(RuntimeError("cut off")))
        assert attempt(root, experiment.cells[1], place, False, lambda record: None).error is not None
    assert attempt(root, experiment.cells[1], place, False, lambda record: None).error is None
    assert json.loads((bench.cell(experiment, 1) / "result.json").read_text())["total_seconds"] < -900


def test_where_files_cannot_have_two_names_they_are_copied(bench: Any, monkeypatch: pytest.MonkeyPatch):
    def refuse(*names: str) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(sharing.os, "link", refuse)
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    assert [outcome.error for outcome in bench.run(experiment)] == [None, None]
    assert len(taken(bench.cell(experiment, 1))) == 1


def test_a_cell_waits_for_the_training_that_it_will_take(bench: Any):
    greedy, beam = bench.experiment(BEAMS).cells
    (other,) = bench.experiment({"grid": {"axes": ONE_BUDGET}, "seed": 2}).cells

    def following(waiting: list[Cell], running: list[Cell], over: list[Cell], fresh: bool = False) -> Cell | None:
        processes = Processes(bench.runs, Place(bench.cache), fresh, 2)
        return processes._next(waiting, running, {training_digest(cell.spec) for cell in over})

    assert following([greedy, beam, other], [], []) == greedy
    assert following([beam, other], [greedy], []) == other
    assert following([beam], [greedy], []) is None
    assert following([beam], [greedy], [greedy]) == beam  # it is being run once more; its checkpoints may be had or not
    assert following([beam, other], [greedy], [], fresh=True) == beam
    assert following([], [], []) is None


def test_scores_decide_where_training_looks_at_them(bench: Any):
    looks = {"grid": {"axes": ONE_BUDGET}, "train": {"validate_bleu": True}}
    plain, drop, other = (
        training_digest(bench.experiment({**looks, **task}).cells[0].spec)
        for task in ({}, {"task": {"drop": True}}, {"task": {"bleu": "tok"}})
    )
    assert plain == drop != other


def test_a_training_by_other_code_is_not_taken(bench: Any, caplog: Any):
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    cells = experiment.cells
    root, place = bench.runs / experiment.name, Place(bench.cache)
    assert attempt(root, cells[0], place, False, lambda record: None).error is None
    path = bench.cell(experiment, 0) / "result.json"
    result = json.loads(path.read_text())
    (name,) = (each for each in result["mechanisms"] if each.endswith("topk"))
    path.write_text(json.dumps({**result, "mechanisms": {**result["mechanisms"], name: "0" * 12}}))
    assert attempt(root, cells[1], place, False, lambda record: None).error is None
    assert taken(bench.cell(experiment, 1)) == []


def test_a_training_that_is_taken_keeps_the_files_it_was_made_with(bench: Any):
    """Also where they are not known; another search alone is no other training."""
    experiment = bench.experiment({**BEAMS, "name": "shared"})
    cells = experiment.cells
    root, place = bench.runs / experiment.name, Place(bench.cache)
    assert attempt(root, cells[0], place, False, lambda record: None).error is None
    first, second = bench.cell(experiment, 0), bench.cell(experiment, 1)
    result = json.loads((first / "result.json").read_text())
    searches = {name: "0" for name in result["mechanisms"] if name.startswith("attnbench.search")}
    (first / "result.json").write_text(json.dumps({**result, "mechanisms": searches}))
    note = json.loads((first / "checkpoints" / "data.json").read_text())
    (first / "checkpoints" / "data.json").write_text(json.dumps({"content_sha256": note["content_sha256"]}))
    assert attempt(root, cells[1], place, False, lambda record: None).error is None
    assert taken(second) == [f"trained as {first.name}"]
    found = json.loads((second / "result.json").read_text())["mechanisms"]
    assert all(name.startswith("attnbench.search") for name in found)
