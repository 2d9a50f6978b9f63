"""What is read is the file with the options laid over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnbench.core.errors import SpecError
from attnbench.experiment.document import label_of, override_document, read_document, set_at, speaks_for_itself
from attnbench.experiment.grid import expand


def test_a_bare_name_on_the_way_becomes_a_mapping(bench: Any):
    path = bench.write("name: x\ntask: {kind: translation, dataset: demo}\nmodel: {kind: transformer, tie: decoder}\n")
    document = read_document(path, ["task.dataset.pairs=10", "model.attention.default.transform=topk"])
    document = override_document(document, "model.attention.default.transform.k=3")
    spec: Any = expand(document).cells[0].spec
    assert spec.task.dataset.pairs == 10
    assert spec.model.attention.cross.transform.k == 3


def test_what_an_axis_does_not_name_is_left_alone():
    raw = {"a": {"b": {"kind": "x", "c": 1}, "d": 2}}
    set_at(raw, "a.b", {"c": 2}, merge=True)
    assert raw == {"a": {"b": {"kind": "x", "c": 2}, "d": 2}}
    set_at(raw, "a.b", {"kind": "y", "e": 1}, merge=True)  # another kind has other fields
    assert raw == {"a": {"b": {"kind": "y", "e": 1}, "d": 2}}
    set_at(raw, "a.b", {"e": 2}, merge=False)
    assert raw["a"]["b"] == {"e": 2}


@pytest.mark.parametrize(("content", "words"), [(b"- 1\n", "a mapping"), (b"", "a mapping"), (b"a: \xff\n", "UTF-8")])
def test_what_is_no_spec_is_told(bench: Any, content: bytes, words: str):
    (bench.folder / "bad.yaml").write_bytes(content)
    with pytest.raises(SpecError, match=words):
        read_document(bench.folder / "bad.yaml")


def test_an_absent_file_and_a_folder_are_told(bench: Any, tmp_path: Path):
    with pytest.raises(SpecError, match="no such file"):
        read_document(tmp_path / "absent.yaml")
    with pytest.raises(SpecError, match="this is a folder"):
        read_document(tmp_path)


@pytest.mark.parametrize(
    ("entry", "label", "speaks"),
    [
        ({"label": "dense", "kind": "softmax"}, "dense", True),
        ({"kind": "entmax", "alpha": 1.7}, "entmax-alpha-1.7", True),
        ({"cross": {"pattern": "window"}, "k": 2}, "window-k-2", True),
        ("sparsemax", "sparsemax", True),
        ([1, "x"], "1,x", False),
        ("inf", "inf", False),
        (float("inf"), "inf", False),
        (8, 8, False),
        (None, None, False),
    ],
)
def test_what_an_entry_is_called(entry: Any, label: object, speaks: bool):
    assert (label_of(entry), speaks_for_itself(entry)) == (label, speaks)
