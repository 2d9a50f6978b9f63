from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from attnbench.core import provenance
from attnbench.core.errors import DataError
from attnbench.core.files import cache_root
from attnbench.data import prepare as module
from attnbench.data.corpus import Data
from attnbench.data.datasets import documents
from attnbench.data.datasets.base import datasets
from attnbench.data.datasets.parallel import ParallelSpec
from attnbench.data.prepare import describe_datasets, is_prepared, prepare, prepared_path, read_manifest
from attnbench.data.recipe import Recipe

SOURCE = ["ein haus", "das alte haus .", "ein hund und eine katze", "der hund", "zwei katzen schlafen"] * 4
TARGET = ["a house", "the old house .", "a dog and a cat", "the dog", "two cats sleep"] * 4


def text(folder: Path, name: str, lines: list[str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(folder / name)


def recipe(folder: Path, source: list[str] = SOURCE, target: list[str] = TARGET, **fields: object) -> Recipe:
    train = {"source": text(folder, "a.de", source), "target": text(folder, "a.en", target)}
    dataset = {"kind": "parallel", "languages": ["de", "en"], "train": train, "hold_every": 5}
    return Recipe.model_validate({"dataset": dataset, "tokenizer": "word", **fields})


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def left_behind(cache: Path) -> list[str]:
    """What a failed attempt leaves in the cache, the lock aside."""
    return [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_folder_with_a_manifest_of_all_its_files(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "text")
    path = prepare(mine, cache=tmp_path / "cache")
    assert path == prepared_path(mine, tmp_path / "cache")
    assert path.parts[-3:] == ("prepared", "parallel", mine.digest())
    assert is_prepared(mine, tmp_path / "cache")
    manifest = read_manifest(path)
    files = everything(path)
    assert set(manifest["files"]) == set(files) - {"manifest.json"}
    for name, facts in manifest["files"].items():
        assert facts == {"bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
    assert [(item["name"], item["bytes"]) for item in manifest["sources"]] == [
        (name, (tmp_path / "text" / name).stat().st_size) for name in ("a.de", "a.en")
    ]
    assert manifest["digest"] == mine.digest()
    assert Recipe.model_validate(manifest["recipe"]) == mine
    assert {split: entry["pairs"] for split, entry in manifest["splits"].items()} == {
        "train": 12,
        "valid": 4,
        "test": 4,
    }
    assert set(manifest["tools"]) == {"attnbench", "sacremoses", "tokenizers"}


def test_counts_are_those_of_the_ids(tmp_path: Path) -> None:
    data = Data.open(prepare(recipe(tmp_path / "text"), cache=tmp_path / "cache"))
    for name in ("train", "valid", "test"):
        numbers, ids = data.manifest["splits"][name], data.split(name).ids
        lengths = [(len(ids.source[i]), len(ids.target[i])) for i in range(len(data.split(name)))]
        assert numbers["source_tokens"] == sum(source for source, _ in lengths)
        assert numbers["target_tokens"] == sum(target for _, target in lengths)
        assert numbers["wide_tokens"] == sum(max(pair) + 1 for pair in lengths)
        assert numbers["widest"] == max(max(pair) for pair in lengths) + 1
        assert numbers["source_unk"] == sum((ids.source[i] == 3).sum() for i in range(len(lengths)))


@pytest.mark.parametrize(
    "tokenizer", ["word", {"kind": "bpe", "vocab": 120}, {"kind": "bpe", "vocab": 100, "joint": False}]
)
def test_twice_is_byte_equal(tmp_path: Path, tokenizer: object) -> None:
    mine = recipe(tmp_path / "text", tokenizer=tokenizer)
    paths = [prepare(mine, cache=tmp_path / name) for name in ("one", "two")]
    assert everything(paths[0]) == everything(paths[1])


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "text")
    path = prepare(mine, cache=tmp_path / "cache")
    (path / "mark").touch()
    assert prepare(mine, cache=tmp_path / "cache") == path
    assert (path / "mark").exists()


@pytest.mark.parametrize(("split", "told"), [("training", "training, valid"), ("valid", "valid:")])
def test_splits_that_there_are_not_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split, told) -> None:
    whole = ParallelSpec.sources

    def sources(self: ParallelSpec, *given: Any) -> Any:
        found = whole(self, *given)
        return {**({} if split == "valid" else {split: found.pop("train")}), "valid": found.pop("train", [])}

    monkeypatch.setattr(ParallelSpec, "sources", sources)
    with pytest.raises(DataError, match=rf"'parallel' has the splits {told}.*`ParallelSpec.sources` has to give train"):
        prepare(recipe(tmp_path / "text"), cache=tmp_path / "cache")


def test_what_other_code_prepared_serves_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a corpus may have become another one, and a recipe does not say so."""
    mine = recipe(tmp_path / "text")
    path = prepare(mine, cache=tmp_path / "cache")
    assert prepare(mine, cache=tmp_path / "cache") == path
    assert "prepared before" not in caplog.text
    whole = provenance._hash
    monkeypatch.setattr(provenance, "_hash", lambda file: "0" * 12 if "/datasets/" in file else whole(file))
    before = (path / "manifest.json").read_bytes()
    assert prepare(mine, cache=tmp_path / "cache") == path
    assert (path / "manifest.json").read_bytes() == before
    (told,) = [line for line in caplog.messages if "prepared before" in line]
    assert told.startswith(f"{path}: prepared before attnbench.data.datasets.parallel changed")


def test_changed_files_of_the_user_are_prepared_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = recipe(tmp_path / "text")
    path = prepare(mine, cache=tmp_path / "cache")
    seen = [read_manifest(path)]
    for last in ("two cats rest", "two cats wake"):  # another size; the same size, an older date
        text(tmp_path / "text", "a.en", [*TARGET[:-1], last])
        os.utime(tmp_path / "text" / "a.en", (1, 1))
        prepare(mine, cache=tmp_path / "cache")
        assert read_manifest(path) not in seen
        seen.append(read_manifest(path))
    assert caplog.text.count("a.en is not what it was when it was prepared") == 2  # once for each change
    (tmp_path / "text" / "a.en").unlink()  # prepared data outlive the files they were made from
    assert prepare(mine, cache=tmp_path / "cache") == path
    assert "a.en is not here; what was prepared from files of these names before serves" in caplog.text


def rewritten(file: str) -> None:
    """Of another content, with as many bytes."""
    path = Path(file)
    path.write_bytes(path.read_bytes().swapcase())


def test_a_file_that_changes_while_it_is_read_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be noted as what was prepared, and never be prepared again."""
    build, mine = module.build, recipe(tmp_path / "text")
    one, file = released(tmp_path / "one"), str(tmp_path / "text" / "a.en")
    for changing, given in ((file, (mine, None)), (str(one / "val.en"), (NAMED, one))):

        def meanwhile(*args: object, changing: str = changing) -> object:
            built = build(*args)  # type: ignore[arg-type]
            rewritten(changing)
            return built

        os.utime(changing, (1, 1))
        monkeypatch.setattr(module, "build", meanwhile)
        with pytest.raises(DataError, match=f"{changing}: changed while it was read; run again"):
            prepare(given[0], cache=tmp_path / "cache", source=given[1])
        assert left_behind(tmp_path / "cache") == []
    monkeypatch.setattr(module, "build", build)
    path = prepare(mine, cache=tmp_path / "cache")
    assert "A HOUSE" in (path / "train.tgt.txt").read_text()


def test_a_document_that_changes_while_it_is_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written out first, before they are built of."""
    sides = {"source": text(tmp_path, "a.de", [*SOURCE, ""] * 9), "target": text(tmp_path, "a.en", [*TARGET, ""] * 9)}
    dataset = {"kind": "documents", "languages": ["de", "en"], "train": [sides], "hold_every": 3}
    mine = Recipe.model_validate({"dataset": dataset, "tokenizer": {"kind": "bpe", "vocab": 120}})
    os.utime(sides["target"], (1, 1))
    write = documents.write_aligned

    def meanwhile(*args: object) -> object:
        written = write(*args)  # type: ignore[arg-type]
        rewritten(sides["target"])
        return written

    monkeypatch.setattr(documents, "write_aligned", meanwhile)
    with pytest.raises(DataError, match=r"a\.en: changed while it was read"):
        prepare(mine, cache=tmp_path / "cache")


def test_files_of_the_user_that_changed_places_are_prepared_again(tmp_path: Path) -> None:
    """The hashes that there are stay the same: exchanged, or one a copy of the other, they are other splits."""
    folder = tmp_path / "text"
    for number in range(3):
        text(folder, f"{number}.de", [f"{line} {number}" for line in SOURCE])
        text(folder, f"{number}.en", [f"{line} {number}" for line in TARGET])
    sides = [{"source": str(folder / f"{number}.de"), "target": str(folder / f"{number}.en")} for number in range(3)]
    mine = Recipe.model_validate(
        {
            "dataset": {
                "kind": "parallel", "languages": ["de", "en"],
                "train": sides[0], "valid": sides[1], "test": sides[2],
            },
            "tokenizer": "word",
        }
    )  # fmt: skip

    def last(split: str) -> str:
        return (path / f"{split}.tgt.txt").read_text().split()[-1]

    path = prepare(mine, cache=tmp_path / "cache")
    assert (last("valid"), last("test")) == ("1", "2")
    for side in ("de", "en"):
        (folder / f"1.{side}").rename(folder / "aside")
        (folder / f"2.{side}").rename(folder / f"1.{side}")
        (folder / "aside").rename(folder / f"2.{side}")
    assert prepare(mine, cache=tmp_path / "cache") == path
    assert (last("valid"), last("test")) == ("2", "1")
    for side in ("de", "en"):
        shutil.copyfile(folder / f"1.{side}", folder / f"2.{side}")
    prepare(mine, cache=tmp_path / "cache")
    assert (last("valid"), last("test")) == ("2", "2")


def test_a_folder_that_is_named_is_one_and_holds_the_files(tmp_path: Path) -> None:
    text(tmp_path, "a.de", SOURCE)
    text(tmp_path, "a.en", TARGET)
    train = {"source": "a.de", "target": "a.en"}
    dataset = {"kind": "parallel", "languages": ["de", "en"], "train": train, "hold_every": 3}
    mine = Recipe.model_validate({"dataset": dataset, "tokenizer": "word"})
    prepare(mine, cache=tmp_path / "cache", source=tmp_path)
    (tmp_path / "empty").mkdir()
    for folder, words in (("empty", "a.de: is not there"), ("nosuch", "no such folder"), ("a.de", "no such folder")):
        with pytest.raises(DataError, match=words):
            prepare(mine, cache=tmp_path / "cache", source=tmp_path / folder)


def released(folder: Path, dog: str = "Ein Hund .") -> Path:
    for split in ("train", "val", "test_2016_flickr"):
        text(folder, f"{split}.de", ["Ein Haus .", dog])
        text(folder, f"{split}.en", ["A house .", "A dog ."])
    return folder


NAMED = Recipe.model_validate({"dataset": "multi30k-de-en", "tokenizer": "word"})


def test_files_other_than_those_prepared_from_are_refused(tmp_path: Path) -> None:
    one, two = released(tmp_path / "one"), released(tmp_path / "two", dog="Zwei Hunde .")
    path = prepare(NAMED, cache=tmp_path / "cache", source=one)
    before = everything(path)
    with pytest.raises(DataError, match=r"from other files than .*two holds") as caught:
        prepare(NAMED, cache=tmp_path / "cache", source=two)
    assert "(test_2016_flickr.de, train.de, val.de differ)" in str(caught.value)
    assert "or delete it, or set ATTNBENCH_CACHE" in str(caught.value)
    assert str(path) in str(caught.value)
    assert everything(path) == before
    (two / "val.en").unlink()
    with pytest.raises(DataError, match=r"two lacks val\.en\.gz; leave --from out"):
        prepare(NAMED, cache=tmp_path / "cache", source=two)
    assert prepare(NAMED, cache=tmp_path / "other", source=one) != path


def test_the_same_files_elsewhere_are_told_to_be_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = prepare(NAMED, cache=tmp_path / "cache", source=released(tmp_path / "one"))
    (path / "mark").touch()
    with caplog.at_level("INFO", "attnbench"):
        assert prepare(NAMED, cache=tmp_path / "cache", source=released(tmp_path / "two")) == path
    assert f"prepared already, from the same files as in {tmp_path / 'two'}" in caplog.text
    assert (path / "mark").exists()


def test_a_prepared_cache_can_be_read_only(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "text")
    path = prepare(mine, cache=tmp_path / "cache")
    lock = path.parent / f"{path.name}.lock"
    lock.unlink()
    assert prepare(mine, cache=tmp_path / "cache") == path
    assert not lock.exists()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (SOURCE[:-1], TARGET, r"a\.en:20: has no partner: .*a\.de has 19 lines and .*a\.en has 20"),
        (["", *SOURCE[1:]], TARGET, r"a\.de:1: an empty line; fill it in.*`empty: drop`"),
        (SOURCE, [*TARGET[:3], " \u3000", *TARGET[4:]], r"a\.en:4: an empty line"),
        ([], [], r"the train split has no pair, its files are empty \(.*a\.de, .*a\.en\); give others"),
    ],
)
def test_bad_pairs_are_named_and_nothing_is_left(tmp_path: Path, source: list, target: list, message: str) -> None:
    mine = recipe(tmp_path / "text", source, target)
    with pytest.raises(DataError, match=message):
        prepare(mine, cache=tmp_path / "cache")
    assert left_behind(tmp_path / "cache") == []
    assert not is_prepared(mine, tmp_path / "cache")


def test_bad_bytes_late_in_a_file_leave_nothing(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "text")
    (tmp_path / "text" / "a.de").write_bytes("".join(line + "\n" for line in SOURCE[:-1]).encode() + b"k\xe4se\n")
    with pytest.raises(DataError, match=r"a\.de:20: not UTF-8 at byte 2"):
        prepare(mine, cache=tmp_path / "cache")
    assert left_behind(tmp_path / "cache") == []


def test_a_failure_leaves_the_older_preparation_alone(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "text")
    before = everything(prepare(mine, cache=tmp_path / "cache"))
    text(tmp_path / "text", "a.en", TARGET[:-2])
    with pytest.raises(DataError):
        prepare(mine, cache=tmp_path / "cache")
    assert everything(prepared_path(mine, tmp_path / "cache")) == before


def test_dropped_pairs_are_counted(tmp_path: Path) -> None:
    source = [*SOURCE, "", "eins", "eins zwei drei vier", "wort " * 7]
    target = [*TARGET, "x", "", "one", "word " * 7]
    mine = recipe(tmp_path / "text", source, target, empty="drop", max_length=6, max_ratio=3)
    splits = read_manifest(prepare(mine, cache=tmp_path / "cache"))["splits"]
    assert splits["train"]["dropped"] == {"empty": 2, "too_long": 1, "ratio": 1}
    assert splits["train"]["read"] == 24
    assert sum(entry["pairs"] for entry in splits.values()) == 20


def test_filters_leave_validation_and_test_alone(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    long = [text(folder, "v.de", ["a " * 30]), text(folder, "v.en", ["b"])]
    raw = recipe(folder, max_length=5, max_ratio=2).dump()
    raw["dataset"] |= {split: {"source": long[0], "target": long[1]} for split in ("valid", "test")}
    splits = read_manifest(prepare(Recipe.model_validate(raw), cache=tmp_path / "cache"))["splits"]
    assert [splits[split]["pairs"] for split in ("valid", "test")] == [1, 1]


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("attnbench.data.store.IdsWriter.write", full)
    with pytest.raises(DataError, match=r"no space left while writing .*set ATTNBENCH_CACHE to a folder on a larger"):
        prepare(recipe(tmp_path / "text"), cache=tmp_path / "cache")
    assert left_behind(tmp_path / "cache") == []


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """A real refusal by the system, in a process of its own: no file may pass 100 kB."""
    code = (
        "import resource, signal, sys; from pathlib import Path; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "from attnbench.data.prepare import prepare; from attnbench.data.recipe import Recipe; "
        "recipe = Recipe.model_validate({'dataset': 'demo'}); "
        "prepare(recipe, cache=Path(sys.argv[1]))"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "cache"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "no space left while writing (File too large)" in ran.stderr.splitlines()[-1]
    assert left_behind(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match=r"cache.*: .*check the path and its permissions"):
        prepare(recipe(tmp_path / "text"), cache=tmp_path / "cache")


def test_a_text_that_may_not_be_read_is_no_fault_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, usual = recipe(tmp_path / "text"), Path.open

    def refuse(path: Path, *args: Any, **named: Any) -> Any:
        if path.parent == tmp_path / "text":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, *args, **named)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"/text/.*: Permission denied; check the path and its permissions$"):
        prepare(given, cache=tmp_path / "cache")


def test_a_cache_that_is_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"cache: is a link to what is not there; mend it, or set ATTNBENCH_CACHE"):
        prepare(recipe(tmp_path / "text"), cache=tmp_path / "cache")


def test_a_damaged_download_is_named_with_what_to_delete(tmp_path: Path) -> None:
    """Where no checksum is known the first one holds, whatever came then."""
    mine = Recipe.model_validate({"dataset": "nc-doc"})
    for remote in mine.dataset.bundles()[0]:
        folder = tmp_path / "cache" / "downloads" / hashlib.sha256(remote.urls[0].encode()).hexdigest()[:16]
        damaged = text(folder, remote.name, ["a page"])
        text(folder, f"{remote.name}.sha256", [hashlib.sha256(Path(damaged).read_bytes()).hexdigest()])
    with pytest.raises(DataError, match=r"no line `<d>` opens a document.*: delete .*downloads/\w{16} and run again"):
        prepare(mine, cache=tmp_path / "cache", offline=True)


def test_what_a_killed_process_left_is_swept_up(tmp_path: Path) -> None:
    mine = recipe(tmp_path / "text")
    path = prepared_path(mine, tmp_path / "cache")
    remains = path.parent / f".{path.name}.01234567~"
    remains.mkdir(parents=True)
    (remains / "train.src.txt").write_text("half")
    prepare(mine, cache=tmp_path / "cache")
    assert not remains.exists()


def test_two_at_once_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    build = module.build

    def slowly(*args: object) -> object:
        made.append(1)
        time.sleep(0.2)
        return build(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "build", slowly)
    mine = recipe(tmp_path / "text")
    threads = [threading.Thread(target=prepare, args=(mine,), kwargs={"cache": tmp_path / "cache"}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert is_prepared(mine, tmp_path / "cache")


def test_a_manifest_that_is_absent_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not prepared data \(no manifest\.json\); run attnbench prepare"):
        Data.open(tmp_path)
    for damaged in ("{", "[]", '{"schema_version": 1}'):
        (tmp_path / "manifest.json").write_text(damaged)
        with pytest.raises(DataError, match="damaged; delete"):
            Data.open(tmp_path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("recipe", None),
        ("recipe", {"dataset": "demo", "sampling": 1}),
        ("files", {"train.src.txt": 3}),
        ("files", ["train.src.txt"]),
        ("splits", {}),
        ("splits", {"train": {"pairs": 3}, "valid": {}, "test": {}}),
        ("vocabulary", {"source": "word.json"}),
        ("schema_version", 99),
    ],
)
def test_a_manifest_that_says_too_little_or_what_is_not_known_is_a_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, value: object
) -> None:
    mine = recipe(tmp_path / "text")
    path = prepare(mine, cache=tmp_path / "cache")
    whole = read_manifest(path)
    (path / "manifest.json").write_text(json.dumps({**whole, part: value}))
    with pytest.raises(DataError, match=f"another version of attnbench.*; delete {path} and run attnbench prepare"):
        Data.open(path)
    assert prepare(mine, cache=tmp_path / "cache") == path
    assert "; preparing again" in caplog.text
    assert read_manifest(path) == whole


def test_a_prepared_folder_with_a_fault_is_prepared_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = prepare(recipe(tmp_path / "text"), cache=tmp_path / "cache")
    ids = path / "train.src.ids"
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-2])
    (path / "test.tgt.txt").unlink()
    assert prepare(recipe(tmp_path / "text"), cache=tmp_path / "cache") == path
    assert "; preparing again" in caplog.text
    assert ids.read_bytes() == whole
    Data.open(path)


def test_a_vocabulary_that_stays_empty_for_the_most_part_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(recipe(tmp_path / "text", tokenizer={"kind": "bpe", "vocab": 70}), cache=tmp_path / "cache")
    assert "entries of a vocabulary" not in caplog.text
    prepare(recipe(tmp_path / "text", tokenizer={"kind": "bpe", "vocab": 9000}), cache=tmp_path / "cache")
    assert caplog.text.count("of the 9,000 entries of a vocabulary") == 1


def test_damage_to_a_prepared_folder_is_told_when_it_is_opened(tmp_path: Path) -> None:
    path = prepare(recipe(tmp_path / "text"), cache=tmp_path / "cache")
    ids = path / "train.src.ids"
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"train\.src\.ids: has another size; delete .* and run attnbench prepare"):
        Data.open(path)
    ids.write_bytes(whole[:-1] + bytes([whole[-1] ^ 64]))
    with pytest.raises(DataError, match=r"train\.src\.ids: holds other bytes than were prepared; delete"):
        Data.open(path)
    ids.unlink()
    with pytest.raises(DataError, match=r"train\.src\.ids: is gone; delete"):
        Data.open(path)
    ids.write_bytes(whole)
    manifest = read_manifest(path)
    (path / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    with pytest.raises(DataError, match="another version of attnbench; delete"):
        Data.open(path)


def test_counts_far_from_the_published_ones_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "val", "test_2016_flickr"):
        for language, lines in (("de", SOURCE), ("en", TARGET)):
            (tmp_path / "m").mkdir(exist_ok=True)
            (tmp_path / "m" / f"{split}.{language}.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    mine = Recipe.model_validate({"dataset": "multi30k-de-en", "tokenizer": {"kind": "bpe", "vocab": 200}})
    prepare(mine, cache=tmp_path / "cache", source=tmp_path / "m")
    assert "multi30k-de-en: train has 20 pairs, published: 29,000" in caplog.text
    assert f"multi30k-de-en: {tmp_path}/m/train.de.gz is not the released file (sha256" in caplog.text
    for name in ("train", "val", "test_2016_flickr"):
        for language in ("de", "en"):
            packed = tmp_path / "m" / f"{name}.{language}.gz"
            packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
            packed.unlink()
    with caplog.at_level("INFO", "attnbench"):
        prepare(mine, cache=tmp_path / "other", source=tmp_path / "m")
    assert f"{tmp_path}/m/train.de could not be compared with the released train.de.gz, which is packed" in caplog.text


def test_what_is_generated_reads_no_file_of_a_folder_and_says_so(tmp_path, caplog):
    recipe = Recipe.model_validate({"dataset": {"kind": "demo", "pairs": 20, "held_out": 5}})
    (tmp_path / "mine").mkdir()
    for _ in range(2):
        with caplog.at_level("INFO", "attnbench"):
            prepare(recipe, cache=tmp_path / "cache", source=tmp_path / "mine")
        assert f"demo is generated: no file of {tmp_path / 'mine'} was read" in caplog.text
        caplog.clear()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNBENCH_CACHE", "/tmp/own")
    assert cache_root() == Path("/tmp/own")
    monkeypatch.delenv("ATTNBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/xdg")
    assert cache_root() == Path("/tmp/xdg/attnbench")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("~/.cache/attnbench").expanduser()


def test_lists_are_plain_data() -> None:
    rows = describe_datasets()
    assert [row["name"] for row in rows] == datasets.kinds()
    assert json.loads(json.dumps(rows)) == rows


def test_preparing_needs_no_torch() -> None:
    code = "import sys, attnbench.data.prepare as p; p.describe_datasets(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_corpus_that_trains_on_its_test_set_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "text"
    side = {"source": text(folder, "a.de", SOURCE), "target": text(folder, "a.en", TARGET)}
    other = {"source": text(folder, "b.de", ["noch einer", "und"]), "target": text(folder, "b.en", ["another", "and"])}
    dataset = {"kind": "parallel", "languages": ["de", "en"], "train": side, "valid": other, "test": side}
    prepare(Recipe.model_validate({"dataset": dataset, "tokenizer": "word"}), cache=tmp_path / "cache")
    assert "20 of the 20 pairs of test stand in the training text too" in caplog.text
    assert "of valid" not in caplog.text


def test_generated_splits_that_share_lines_by_design_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    raw = {"dataset": {"kind": "copy", "symbols": 2, "longest": 2, "pairs": 50, "held_out": 20}, "tokenizer": "word"}
    prepare(Recipe.model_validate(raw), cache=tmp_path)
    assert "stand in the training text" not in caplog.text
