from __future__ import annotations

import json
from typing import Any

import pytest

from attnbench.core.lock import locked
from attnbench.core.run_files import TESTS
from attnbench.experiment.adopt import adopt, finished_in
from attnbench.experiment.run import Run, is_done


@pytest.mark.parametrize("where", ["runs/other", "results", "results/deep/down"])
def test_a_cell_that_is_done_elsewhere_is_taken_over_without_checkpoints(
    bench: Any, experiment: Any, fill: Any, where: str
):
    cell = experiment.cells[0]
    there = bench.folder / where / "cells" / f"another-label-s1-{cell.digest[:8]}"
    fill(there, cell.digest)
    root = bench.runs / "tiny"
    failed = root / "cells" / cell.folder / "error.txt"
    failed.parent.mkdir(parents=True)
    failed.write_text("of another time")
    assert not is_done(root, cell)
    assert adopt(root, cell, finished_in([bench.folder / where.split("/")[0]])) == there
    assert is_done(root, cell)
    found = {str(path.relative_to(failed.parent)) for path in failed.parent.rglob("*") if path.is_file()}
    assert found == {"spec.yaml", "hyps/test.txt", "metrics.jsonl", "result.json"}
    assert (failed.parent / "result.json").read_bytes() == (there / "result.json").read_bytes()


def test_tests_that_were_made_beside_a_cell_come_with_it(bench: Any, experiment: Any, fill: Any):
    """The corpus's text, on which they could be made again, is in no committed table."""
    cell, there, root = experiment.cells[0], bench.folder / "results" / "x", bench.runs / "tiny"
    fill(there / "cells" / f"a-s1-{cell.digest[:8]}", cell.digest)
    (there / TESTS).write_text('{"test/bleu:1": 0.5, "test/bleu:2": 0.25}')
    root.mkdir(parents=True)
    (root / TESTS).write_text('{"test/bleu:2": 0.75}')
    adopt(root, cell, finished_in([bench.folder / "results"]))
    assert json.loads((root / TESTS).read_text()) == {"test/bleu:1": 0.5, "test/bleu:2": 0.75}


def test_damaged_tests_beside_a_cell_do_not_come_with_it(bench: Any, experiment: Any, fill: Any):
    cell, there, root = experiment.cells[0], bench.folder / "results" / "x", bench.runs / "tiny"
    fill(there / "cells" / f"a-s1-{cell.digest[:8]}", cell.digest)
    (there / TESTS).write_text('{"test/bleu:1": null}')
    adopt(root, cell, finished_in([bench.folder / "results"]))
    assert is_done(root, cell)
    assert not (root / TESTS).exists()


def test_what_is_not_that_run_is_not_taken_over(bench: Any, experiment: Any, fill: Any):
    cell = experiment.cells[0]
    there = bench.folder / "results" / "cells"
    fill(there / f"a-s1-{cell.digest[:8]}", cell.digest[:8] + "0000")  # the same name by chance
    fill(there / f"b-s1-{cell.digest[:8]}", cell.digest)
    (there / f"b-s1-{cell.digest[:8]}" / "result.json").write_text('{"digest": ')  # damaged
    fill(there / f"c-s1-{cell.digest[:8]}", cell.digest)
    (there / f"c-s1-{cell.digest[:8]}" / "result.json").unlink()  # not done
    assert adopt(bench.runs, cell, finished_in([bench.folder / "results", bench.folder / "absent"])) is None
    assert not (bench.runs / "cells").exists()


def test_a_cell_that_is_being_run_is_not_overwritten(bench: Any, experiment: Any, fill: Any):
    cell = experiment.cells[0]
    fill(bench.folder / "results" / "cells" / f"a-s1-{cell.digest[:8]}", cell.digest)
    with Run.claim(bench.runs, cell):
        assert adopt(bench.runs, cell, finished_in([bench.folder / "results"])) is None
    assert not is_done(bench.runs, cell)


def test_a_cell_is_not_taken_from_itself(bench: Any, experiment: Any, fill: Any):
    cell = experiment.cells[0]
    fill(bench.runs / "cells" / cell.folder, cell.digest)
    with locked(bench.folder / "other"):
        assert adopt(bench.runs, cell, finished_in([bench.runs])) is None
