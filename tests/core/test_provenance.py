"""Which files members of families come from, and which of them have changed."""

from __future__ import annotations

import pytest

from attnbench.core import provenance
from attnbench.core.provenance import changed_members, member_files
from attnbench.core.spec import Spec
from attnbench.experiment.spec import CellSpec

TRANSFORM = "attnbench.attention.transforms.topk"
CELL = CellSpec.model_validate(
    {
        "task": {"kind": "copying", "dataset": "copy"},
        "model": {"kind": "transformer", "attention": {"default": {"transform": {"kind": "topk", "k": 2}}}},
        "search": "greedy",
    }
)


def test_the_files_of_what_a_cell_is_made_of():
    files = member_files(CELL.model)
    assert {TRANSFORM, "attnbench.models.transformer"} <= set(files)
    assert all(len(hash) == 12 for hash in files.values())
    assert list(member_files(CELL.search)) == ["attnbench.search.greedy"]
    assert set(member_files(CELL.train, CELL.search)) == {"attnbench.train.optim", "attnbench.search.greedy"}
    for absent in ("sparsemax", "softmax"):  # softmax is what a site has that none is said for
        assert f"attnbench.attention.transforms.{absent}" not in files


def test_only_what_is_known_of_both_is_compared():
    files = member_files(CELL.model)
    assert changed_members(files, None) == changed_members(files, {}) == changed_members(files, files) == []
    assert changed_members(files, {**files, TRANSFORM: "0", "gone": "1"}) == [TRANSFORM]


def test_a_class_that_no_file_holds_is_left_out(monkeypatch: pytest.MonkeyPatch):
    class Here(Spec):
        kind: str = "here"

    def lost(cls: type) -> str:
        raise OSError("source code not available")

    monkeypatch.setattr(provenance.inspect, "getsourcefile", lost)
    assert member_files(Here()) == {}


def test_a_file_is_remembered_as_it_was_loaded(monkeypatch: pytest.MonkeyPatch):
    """Somebody edits it while another cell is trained."""
    import attnbench.attention.transforms.sparsemax  # noqa: F401

    seen: list[str] = []
    monkeypatch.setattr(provenance, "_hash", lambda path: seen.append(path) or "0")
    member_files(CELL.search)
    assert any(path.endswith("transforms/sparsemax.py") for path in seen)
