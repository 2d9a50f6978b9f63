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


def test_a_section_that_is_left_out_is_of_its_usual_kind(bench: Any):
    text = "name: x\ntask: {kind: translation, dataset: demo}\n"
    given = ["search.size=2", "train.optimizer.weight_decay=0.1", "model.width=64",
             "model.tie=decoder"]  # fmt: skip
    spec: Any = expand(read_document(bench.write(text), given)).cells[0].spec
    assert (spec.search.kind, spec.search.size) == ("beam", 2)
    assert (spec.train.optimizer.kind, spec.train.optimizer.weight_decay) == ("adam", 0.1)
    assert (spec.model.kind, spec.model.width) == ("transformer", 64)
    axes = "search: [{label: two, size: 2}, {label: four, size: 4}], train.schedule.lr: [0.1, 0.2]"
    text += f"model: {{kind: transformer, tie: decoder}}\ngrid: {{axes: {{{axes}}}}}\n"
    found: Any = [cell.spec for cell in expand(read_document(bench.write(text))).cells]
    assert [(spec.search.size, spec.train.schedule.lr) for spec in found] == [(2, 0.1), (2, 0.2), (4, 0.1), (4, 0.2)]
    assert {spec.train.schedule.kind for spec in found} == {"inverse_sqrt"}


@pytest.mark.parametrize(("given", "words"), [
    ("model.attention.cross.transform.k=8", "a transform needs a 'kind' (known: "),  # softmax has no k
    ("train.optimizer.speed=1", "an optimizer needs a 'kind'"),
    ("search={size: 2}", "a search needs a 'kind'"),  # it takes the place of what is there
])  # fmt: skip
def test_what_the_usual_kind_has_not_asks_for_one(bench: Any, given: str, words: str):
    text = "name: x\ntask: {kind: translation, dataset: demo}\n"
    with pytest.raises(SpecError) as caught:
        expand(read_document(bench.write(text), [given]))
    assert words in str(caught.value)


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


@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_a_spec_of_another_encoding_is_told_with_its_line(tmp_path: Path, ends: bytes):
    (tmp_path / "spec.yaml").write_bytes(ends.join([b"# caf\xc3\xa9", b"name: caf\xe9", b""]))
    with pytest.raises(SpecError, match=r"spec\.yaml:2: not UTF-8 at byte 10 of the line \(0xe9\); convert .*iconv"):
        read_document(tmp_path / "spec.yaml")
