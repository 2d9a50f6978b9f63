"""What a cell cannot be, whatever its parts are by themselves."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from attnbench.experiment.spec import CellSpec
from attnbench.models.transformer import TransformerSpec

TASK: dict[str, Any] = {"kind": "copying", "dataset": "copy"}


@pytest.mark.parametrize(("schedule", "reads"), [("noam", True), ("constant", False), ("inverse_sqrt", False)])
def test_a_schedule_that_reads_the_width_needs_a_model_that_has_one(
    schedule: str, reads: bool, monkeypatch: pytest.MonkeyPatch
):
    raw = {"task": TASK, "train": {"schedule": schedule}}
    assert CellSpec.model_validate(raw).train.schedule.reads_width is reads
    monkeypatch.setattr(TransformerSpec, "state_width", None)
    if not reads:
        CellSpec.model_validate(raw)
        return
    with pytest.raises(ValidationError, match="'noam' reads the width of the model, and 'transformer' tells none"):
        CellSpec.model_validate(raw)


def test_a_coverage_penalty_needs_a_model_that_attends():
    search = {"kind": "beam", "coverage": "wu"}
    CellSpec.model_validate({"task": TASK, "model": "lstm", "search": search})
    blind = {"kind": "lstm", "readout": "state", "attention": {"cross": {"module": "none"}}}
    with pytest.raises(ValidationError, match="this 'lstm' attends to nothing"):
        CellSpec.model_validate({"task": TASK, "model": blind, "search": search})
