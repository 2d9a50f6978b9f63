"""Fertilities of a prepared corpus, and the aligner of its words."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from attnbench.core.errors import DataError
from attnbench.core.tree import map_batch
from attnbench.data import fertility
from attnbench.data.alignment.fertility import fertilities
from attnbench.data.alignment.model import Aligner
from attnbench.data.corpus import Data
from attnbench.data.fertility import SINK, with_fertilities, with_sink, word_aligner
from attnbench.data.prepare import prepare
from attnbench.data.recipe import Recipe

DEMO = {"kind": "demo", "pairs": 60, "held_out": 8}


@pytest.fixture
def data(tmp_path) -> Data:
    recipe = {"dataset": DEMO, "tokenizer": {"kind": "bpe", "vocab": 200, "joint": True}}
    return Data.open(prepare(Recipe.model_validate(recipe), cache=tmp_path / "cache"))


def test_batches_have_the_fertilities_of_their_sources(data):
    aligned = with_fertilities(data)
    ids = data.split("train").ids
    source = [" ".join(map(str, [*ids.source[line].tolist(), SINK])) for line in range(60)]
    target = [" ".join(map(str, ids.target[line].tolist())) for line in range(60)]
    links = Aligner.train(source, target, directions=("forward",)).align(source, target, "forward")
    wanted = fertilities(links, [len(line.split()) for line in source])
    seen = 0
    for batch in aligned.eval_batches("train", tokens=300):
        assert batch.fertility is not None
        assert batch.fertility.shape == batch.source.shape
        for row, line in enumerate(batch.index.tolist()):
            length = int(batch.source_valid[row].sum())
            assert batch.fertility[row, : length - 1].tolist() == wanted[line][:-1].tolist()
            assert batch.fertility[row, length - 1] == 1  # EOS
            assert not batch.fertility[row, length:].any()
            seen += 1
    assert seen == 60
    assert max(int(count.max()) for count in wanted) > 1


def test_every_split_has_some_and_training_batches_too(data):
    aligned = with_fertilities(data)
    for split in ("valid", "test"):
        assert all(batch.fertility is not None for batch in aligned.eval_batches(split, tokens=300))
    _, batch = next(aligned.batches(1, tokens=300))
    assert batch.fertility is not None
    plain = next(data.batches(1, tokens=300))[1]
    assert plain.fertility is None
    assert torch.equal(plain.source, batch.source)


def test_alignments_are_made_once_and_the_data_stay_what_they_were(data, monkeypatch):
    first = [batch.fertility for batch in with_fertilities(data).eval_batches("valid", tokens=300)]
    monkeypatch.setattr(Aligner, "train", None)
    again = with_fertilities(Data.open(data.path))
    assert all(torch.equal(a, b.fertility) for a, b in zip(first, again.eval_batches("valid", tokens=300), strict=True))


def test_a_file_that_is_not_what_was_written_is_made_again(data, caplog):
    """A spoilt number would be a length of another size, unseen."""
    with_fertilities(data)
    path = data.path / "fertility-1" / "valid.ids"
    whole = path.read_bytes()
    for spoilt in (b"\xfa" + whole[1:], whole[:-10]):
        path.write_bytes(spoilt)
        caplog.clear()
        with_fertilities(data)
        assert "; aligning again" in caplog.text
        assert path.read_bytes() == whole
    noted = data.path / "fertility-1" / "files.json"
    for damaged in ("[]", "{}", "{", f'{{"valid.ids": {{"bytes": {len(whole)}}}}}', '{"valid.ids": 3}'):
        noted.write_text(damaged)
        caplog.clear()
        with_fertilities(data)
        assert "; aligning again" in caplog.text
    caplog.clear()
    with_fertilities(data)
    assert caplog.text == ""


def test_what_an_older_version_left_serves(data, monkeypatch, caplog):
    with_fertilities(data)
    (data.path / "fertility-1" / "files.json").unlink()
    monkeypatch.setattr("attnbench.data.fertility.making", refuse)
    assert next(with_fertilities(data).eval_batches("valid", tokens=300)).fertility is not None
    assert caplog.text == ""


def test_of_two_that_see_a_fault_one_makes_it_again(data, monkeypatch):
    with_fertilities(data)
    path = data.path / "fertility-1" / "valid.ids"
    path.write_bytes(path.read_bytes()[:-2])
    made: list[int] = []
    seen: list[bool] = []
    barrier, write, whole = threading.Barrier(2), fertility._write_fertilities, fertility._is_whole

    def is_whole(*given):
        found = whole(*given)
        seen.append(found)
        if len(seen) <= 2:
            barrier.wait(60)
        return found

    monkeypatch.setattr(fertility, "_write_fertilities", lambda *given: (made.append(1), write(*given)))
    monkeypatch.setattr(fertility, "_is_whole", is_whole)
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda _: with_fertilities(data), range(2)))) == 2
    assert made == [1]


def prepared(folder, word: str) -> Data:
    """From the user's own files, which hold this word; other files give other data in the same place."""
    folder.mkdir(exist_ok=True)
    for end in ("de", "en"):
        (folder / f"a.{end}").write_text("".join(f"{word} {number} {end}\n" for number in range(20)))
    dataset = {"kind": "parallel", "languages": ["de", "en"], "hold_every": 5}
    raw = {"dataset": {**dataset, "train": {"source": "a.de", "target": "a.en"}}, "tokenizer": "word"}
    return Data.open(prepare(Recipe.model_validate(raw), cache=folder / "cache", source=folder))


def aligner(data):
    return word_aligner(data, lowercase=True)


def beside(data: Data) -> list[str]:
    """What was put beside the prepared files, locks and hidden ones aside."""
    own = {*data.manifest["files"], "manifest.json"}
    return [file.name for file in data.path.iterdir() if file.name not in own and file.suffix != ".lock"]


@pytest.mark.parametrize("make", [with_fertilities, aligner])
def test_what_older_data_ask_for_is_not_taken_from_newer_ones(tmp_path, make):
    old = prepared(tmp_path / "text", "old")
    make(prepared(tmp_path / "text", "new"))  # as many words
    with pytest.raises(DataError, match="the data were prepared anew while they were in use; run again"):
        make(old)


@pytest.mark.parametrize(
    ("make", "step"), [(with_fertilities, "train"), (with_fertilities, "align"), (aligner, "train")]
)
def test_what_is_made_of_older_data_never_lies_beside_newer_ones(tmp_path, monkeypatch, make, step):
    old, real = prepared(tmp_path / "text", "old"), getattr(Aligner, step)
    new: list[Data] = []

    def meanwhile(*given, **named):
        new[:] = new or [prepared(tmp_path / "text", "new one")]
        return real(*given, **named)

    monkeypatch.setattr(Aligner, step, meanwhile)
    with pytest.raises(DataError, match="the data were prepared anew while they were in use; run again"):
        make(old)
    assert old.path == new[0].path
    assert beside(new[0]) == []
    make(new[0])
    assert len(beside(new[0])) == 1


def test_fertilities_of_other_data_are_made_again(data, tmp_path, caplog):
    """An earlier version could leave them there."""
    other = {"dataset": {**DEMO, "seed": 2}, "tokenizer": {"kind": "bpe", "vocab": 200, "joint": True}}
    theirs = with_fertilities(Data.open(prepare(Recipe.model_validate(other), cache=tmp_path / "other")))
    shutil.copytree(theirs.path / "fertility-1", data.path / "fertility-1")
    ids = with_fertilities(data).split("train").ids
    assert "train.ids: is of other data; aligning again" in caplog.text
    assert ids.fertility is not None
    assert ids.fertility.offsets.tolist() == ids.source.offsets.tolist()


def test_an_aligner_that_cannot_be_read_is_learned_again(data, caplog):
    first = aligner(data)
    path = data.path / "aligner-1-lc.npz"
    whole = path.read_bytes()
    method = whole.rindex(b"PK\x01\x02") + 10  # how the last member is packed, as the archive's table says
    for spoilt in (b"", whole[: len(whole) // 2], whole[:method] + b"\x63" + whole[method + 1 :]):
        path.write_bytes(spoilt)
        caplog.clear()
        assert aligner(data).source == first.source
        assert caplog.text.count(f"{path}: cannot be read; learning it again") == 1
        assert path.read_bytes() == whole


def test_where_nothing_can_be_written_what_is_there_serves(data, monkeypatch):
    with_fertilities(data)
    word_aligner(data, lowercase=False)
    monkeypatch.setattr("attnbench.data.fertility.making", refuse)
    assert next(with_fertilities(data).eval_batches("valid", tokens=300)).fertility is not None
    assert word_aligner(data, lowercase=False).source
    with pytest.raises(DataError, match="ATTNBENCH_CACHE"):
        word_aligner(data, lowercase=True)


def refuse(path):
    raise PermissionError(13, "Permission denied", str(path))


def test_a_batch_maps_what_it_has(data):
    batch = next(data.eval_batches("valid", tokens=300))
    assert map_batch(lambda tensor: tensor[:1], batch).fertility is None
    assert map_batch(lambda tensor: tensor[:1], batch).source.shape[0] == 1


def test_the_aligner_of_words_is_kept_and_knows_the_sink(data, monkeypatch):
    first = word_aligner(data, lowercase=True)
    monkeypatch.setattr(Aligner, "train", None)
    kept = word_aligner(data, lowercase=True)
    lines = list(data.split("test").source), list(data.split("test").target)
    assert kept.align(with_sink(lines[0]), lines[1]) == first.align(with_sink(lines[0]), lines[1])
    assert SINK in kept.source
    assert with_sink(["", "a b"]) == [SINK, f"a b {SINK}"]
