from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from attnbench.core.errors import AttnbenchError
from attnbench.core.lock import is_locked
from attnbench.experiment import executor
from attnbench.experiment.executor import Inline, Processes, attempt, choose_executor
from attnbench.experiment.grid import Cell
from attnbench.experiment.pipeline import Place
from attnbench.experiment.run import Run, is_done
from attnbench.tasks.translation import TranslationSpec


def quiet(record: Any) -> None:
    pass


@pytest.fixture
def cells(bench: Any) -> list[Cell]:
    return list(bench.experiment({"grid": {"seeds": [1, 2, 3], "axes": {"model.attention.default.budget": [2]}}}).cells)


def patched(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, seed: int = 1) -> None:
    """run_cell raises `error` for one seed and finishes the others at once."""

    def run_cell(cell: Cell, run: Run, place: Place, listen: Any) -> None:
        run.log({"step": 1})
        if cell.seed == seed and error is not None:
            raise error
        run.finish({"digest": cell.digest, "metrics": {}})

    monkeypatch.setattr(executor, "run_cell", run_cell)


def test_a_failed_cell_is_kept_and_the_others_go_on(bench: Any, cells: list[Cell], monkeypatch: pytest.MonkeyPatch):
    patched(monkeypatch, ValueError("first line\nsecond line"), seed=2)
    outcomes = list(Inline(bench.runs, Place(bench.cache), False, lambda cell: quiet).map(cells))
    assert [outcome.error for outcome in outcomes] == [None, "ValueError: first line", None]
    folder = bench.runs / "cells" / cells[1].folder
    assert (folder / "error.txt").read_text() == "ValueError: first line\n"
    assert "second line" in (folder / "traceback.txt").read_text()
    assert [is_done(bench.runs, cell) for cell in cells] == [True, False, True]
    patched(monkeypatch, None)
    assert attempt(bench.runs, cells[1], Place(bench.cache), False, quiet).error is None
    assert {path.name for path in folder.iterdir()} == {"spec.yaml", "metrics.jsonl", "result.json"}


def test_a_cell_that_another_process_has_done_meanwhile_is_left_alone(
    bench: Any, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
):
    patched(monkeypatch, None)
    assert attempt(bench.runs, cells[0], Place(bench.cache), False, quiet).error is None
    patched(monkeypatch, ValueError("ran again"))
    assert attempt(bench.runs, cells[0], Place(bench.cache), False, quiet).error is None
    assert attempt(bench.runs, cells[0], Place(bench.cache), True, quiet).error == "ValueError: ran again"


def test_an_expected_error_is_its_message(bench: Any, cells: list[Cell], monkeypatch: pytest.MonkeyPatch):
    patched(monkeypatch, AttnbenchError("the disk is full; free some"))
    assert attempt(bench.runs, cells[0], Place(bench.cache), False, quiet).error == "the disk is full; free some"
    folder = bench.runs / "cells" / cells[0].folder
    assert (folder / "error.txt").read_text() == "the disk is full; free some\n"
    assert not (folder / "traceback.txt").exists()


def test_an_interrupt_ends_the_grid_and_frees_the_cell(bench: Any, cells: list[Cell], monkeypatch: pytest.MonkeyPatch):
    patched(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        list(Inline(bench.runs, Place(bench.cache), False, lambda cell: quiet).map(cells))
    folder = bench.runs / "cells" / cells[0].folder
    assert not is_locked(folder / "lock")
    assert {path.name for path in folder.iterdir()} == {"spec.yaml", "metrics.jsonl"}


def test_a_cell_that_another_process_runs_is_told_and_left_alone(bench: Any, cells: list[Cell]):
    with Run.claim(bench.runs, cells[0]) as run:
        outcome = attempt(bench.runs, cells[0], Place(bench.cache), True, quiet)
        assert "the cell is being run there" in (outcome.error or "")
        assert not (run.folder / "error.txt").exists()


def test_a_folder_that_cannot_be_made_is_an_outcome(bench: Any, cells: list[Cell]):
    bench.runs.write_text("a file where the runs should go")
    outcome = attempt(bench.runs, cells[0], Place(bench.cache), False, quiet)
    assert "Not a directory" in (outcome.error or "")


def test_a_fresh_start_forgets_the_finished_cell(bench: Any, cells: list[Cell], monkeypatch: pytest.MonkeyPatch):
    patched(monkeypatch, None)
    attempt(bench.runs, cells[0], Place(bench.cache), False, quiet)
    patched(monkeypatch, ValueError("no"))
    attempt(bench.runs, cells[0], Place(bench.cache), True, quiet)
    assert not is_done(bench.runs, cells[0])


def test_jobs_share_the_cores(bench: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made: Any = [
        choose_executor(bench.runs, Place(bench.cache), jobs=jobs, fresh=False, listen=lambda cell: quiet)
        for jobs in (1, 3, 16)
    ]
    assert [type(one).__name__ for one in made] == ["Inline", "Processes", "Processes"]
    assert [one.place.threads for one in made] == [8, 2, 1]


EVIL = '''
import os, time
from typing import Literal
from attnbench.tasks.translation import TranslationSpec

class EvilSpec(TranslationSpec):
    """Does to its process what `deed` says when the data are opened."""
    deed: Literal["die", "raise", "wait", "none"] = "none"

    def open(self, at):
        if self.deed == "die":
            os._exit(9)
        if self.deed == "raise":
            raise RuntimeError("a fault")
        if self.deed == "wait":
            (at / f"waiting-{os.getpid()}").touch()
            time.sleep(120)
        return super().open(at)
'''


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """evil(cell, deed) -> the cell with a task that misbehaves; workers can import it."""
    name = f"attnbench_evil_{tmp_path.name}"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{name}.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    module = __import__("importlib").import_module(name)

    def make(cell: Cell, deed: Literal["die", "raise", "wait", "none"]) -> Cell:
        task = cell.spec.task
        changed = module.EvilSpec.model_validate({**task.dump(), "deed": deed})
        spec = cell.spec.model_copy(update={"task": changed})
        return dataclasses.replace(cell, spec=spec, label=deed)

    yield make
    del sys.modules[name]


def test_a_worker_that_dies_takes_its_own_cell_alone(bench: Any, cells: list[Cell], evil: Any):
    task = cells[0].spec.task
    assert isinstance(task, TranslationSpec)
    chosen = [evil(cells[0], "die"), evil(cells[1], "raise"), evil(cells[2], "none")]
    outcomes = {
        outcome.cell.label: outcome.error for outcome in Processes(bench.runs, Place(bench.cache), False, 2).map(chosen)
    }
    assert outcomes["none"] is None
    assert outcomes["raise"] == "RuntimeError: a fault"
    assert "its process died" in (outcomes["die"] or "")
    assert is_done(bench.runs, chosen[2])
    for cell in chosen[:2]:
        assert (bench.runs / "cells" / cell.folder / "error.txt").read_text().strip() == outcomes[cell.label]
    result = json.loads((bench.runs / "cells" / chosen[2].folder / "result.json").read_text())
    assert result["metrics"]["train/steps"] == 4


ORPHAN = """
import sys
sys.path[:0] = eval(sys.argv[1])
if __name__ == "__main__":
    import importlib, pickle
    from pathlib import Path
    from attnbench.experiment.executor import Processes
    from attnbench.experiment.pipeline import Place
    runs, cache, cells = pickle.loads(Path(sys.argv[2]).read_bytes())
    list(Processes(runs, Place(cache), False, 1).map(cells))
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_workers_do_not_outlive_their_parent(bench: Any, cells: list[Cell], evil: Any, sign: signal.Signals):
    import pickle

    cell = evil(cells[0], "wait")
    (bench.folder / "work").write_bytes(pickle.dumps((bench.runs, bench.cache, [cell])))
    script = bench.write(ORPHAN, "orphan.py")
    paths = [str(bench.folder / "modules"), str(Path.cwd())]
    parent = subprocess.Popen([sys.executable, script, repr(paths), bench.folder / "work"], stderr=subprocess.DEVNULL)
    at = cell.spec.task.data_path(bench.cache)
    try:
        (waiting,) = eventually(lambda: list(at.glob("waiting-*")))
        worker = int(waiting.name.split("-")[1])
        lock = bench.runs / "cells" / cell.folder / "lock"
        assert is_locked(lock)
        parent.send_signal(sign)
        assert parent.wait(20) != 0
        assert eventually(lambda: not is_locked(lock))
        assert eventually(lambda: not alive(worker))
    finally:
        parent.kill()
        parent.wait()
        for path in at.glob("waiting-*"):
            path.unlink()


def eventually(question: Any, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = question()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError("it never came true")


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_tell_what_their_parent_would(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    executor.settle(logging.INFO)
    try:
        logging.getLogger("attnbench").info("a line of progress")
        logging.getLogger("attnbench").debug("a detail")
        assert capfd.readouterr().err == "a line of progress\n"
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
