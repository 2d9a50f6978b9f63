from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from attnbench.core.errors import DataError
from attnbench.data.datasets.base import DatasetSpec, Languages, Remote
from attnbench.data.finder import Finder
from attnbench.data.hub import Hub
from attnbench.data.obtain import not_found, obtain


def packed(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


class Corpus(DatasetSpec):
    kind: Literal["corpus"] = "corpus"
    by_hand: ClassVar = "https://example.org/corpus"
    remotes: ClassVar[list[list[Remote]]] = []
    copy: ClassVar[Hub | None] = None  # type: ignore[assignment]

    def pair(self) -> Languages:
        return Languages("de", "en")

    def bundles(self) -> list[list[Remote]]:
        return self.remotes

    def hub(self) -> Hub | None:
        return self.copy


def corpus(remotes: list[list[Remote]], hub: Hub | None = None) -> Corpus:
    return type("Here", (Corpus,), {"remotes": remotes, "copy": hub, "__annotations__": {}, "__module__": __name__})()


def test_archives_are_fetched_unpacked_and_recorded(server, tmp_path: Path) -> None:
    data = packed(("deep/train.de", b"eins\n"))
    (server.folder / "a.tgz").write_bytes(data)
    got = obtain(corpus([[Remote("a.tgz", (server.url + "a.tgz",))]]), tmp_path / "cache", None)
    assert got.files.find("train.de").read_bytes() == b"eins\n"
    sha256 = hashlib.sha256(data).hexdigest()
    assert got.fetched == [{"name": "a.tgz", "url": server.url + "a.tgz", "sha256": sha256}]


def test_the_second_way_of_publishing_is_tried_when_the_first_is_gone(server, tmp_path: Path) -> None:
    (server.folder / "train.de").write_bytes(b"eins\n")
    gone, there = (Remote("train.de", (server.url + path,)) for path in ("gone/train.de", "train.de"))
    assert obtain(corpus([[gone], [there]]), tmp_path / "cache", None).files.find("train.de") is not None


def test_the_message_says_what_was_tried_what_is_wanted_and_what_to_run(server, tmp_path: Path) -> None:
    remotes = [[Remote("a.tgz", (server.url + "one/a.tgz", server.url + "two/a.tgz"))]]
    with pytest.raises(DataError) as caught:
        obtain(corpus(remotes), tmp_path / "cache", None)
    assert str(caught.value).splitlines() == [
        "corpus: cannot be had. Tried:",
        f"  {server.url}one/a.tgz: the server answers 404",
        f"  {server.url}two/a.tgz: the server answers 404",
        "Wanted:",
        "  a.tgz",
        "Get them by hand from https://example.org/corpus",
        "then run:",
        "  attnbench prepare corpus --from DIR",
    ]


@pytest.mark.parametrize("by_variable", [False, True])
def test_offline_asks_nobody(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
    if by_variable:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (server.folder / "train.de").write_bytes(b"eins\n")
    hub = Hub({"train": "hf://datasets/no/where/*.parquet"})
    here = corpus([[Remote("train.de", (server.url + "train.de",))]], hub)
    with pytest.raises(DataError, match=r"hf://datasets/no/where/\*.parquet: offline, and not in the cache"):
        obtain(here, tmp_path, None, offline=not by_variable)
    assert server.asked == []


def test_a_page_in_place_of_an_archive_sends_on_to_the_next_way(server, tmp_path: Path) -> None:
    whole = packed(("train.de", b"eins\n"))
    for folder, data in (("page", b"<html>gone</html>" * 100), ("cut", whole[:-9]), ("good", whole)):
        (server.folder / folder).mkdir()
        (server.folder / folder / "a.tgz").write_bytes(data)
    bad, cut, good = (server.url + f"{folder}/a.tgz" for folder in ("page", "cut", "good"))
    for remotes in ([[Remote("a.tgz", (bad, cut, good))]], [[Remote("a.tgz", (bad,))], [Remote("a.tgz", (good,))]]):
        got = obtain(corpus(remotes), tmp_path / f"cache-{len(remotes)}", None)
        assert got.files.find("train.de").read_bytes() == b"eins\n"
        assert [each["url"] for each in got.fetched] == [good]
    with pytest.raises(
        DataError, match=r"page/a\.tgz: what it sent is no whole archive \(.*\); it begins with b'<html>gone"
    ):
        obtain(corpus([[Remote("a.tgz", (bad,))]]), tmp_path / "cache", None)
    assert not list((tmp_path / "cache").rglob("a.tgz"))


def test_a_copy_of_the_hub_is_told_and_recorded_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "raw" / "corpus" / "hub").mkdir(parents=True)
    url = "hf://datasets/some/where/*.parquet"
    got = obtain(corpus([[Remote("a.tgz", ())]], Hub({"train": url}, "an edited copy")), tmp_path, None, offline=True)
    assert got.fetched == [{"name": "train", "url": url, "note": "an edited copy"}]
    assert "corpus: the hub's copy is used: an edited copy" in caplog.text


def test_another_archive_of_a_released_name_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = packed(("train.de", b"eins\n"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.tgz").write_bytes(data)
    for known, told in (("md5:" + hashlib.md5(data).hexdigest(), False), ("sha256:" + "0" * 64, True)):
        obtain(corpus([[Remote("a.tgz", (), known)]]), tmp_path / "cache", tmp_path / "mine")
        assert ("a.tgz is not the released archive" in caplog.text) == told


def test_linked_folders_are_looked_into_once(tmp_path: Path) -> None:
    store, mine = tmp_path / "store", tmp_path / "mine"
    (store / "deep").mkdir(parents=True)
    (store / "deep" / "train.de").write_bytes(b"eins\n")
    (store / "all.tgz").write_bytes(packed(("train.en", b"one\n")))
    (store / "deep" / "up").symlink_to(store)  # a loop
    mine.mkdir()
    (mine / "link").symlink_to(store)
    (store / "another").symlink_to(store / "deep")
    got = obtain(corpus([[Remote("all.tgz", ())]]), tmp_path / "cache", mine)
    assert got.files.find("deep/train.de") is not None
    assert got.files.find("another/train.de") is not None
    assert got.files.find("train.de").read_bytes() == b"eins\n"
    assert got.files.find("train.en").read_bytes() == b"one\n"


def test_a_folder_of_the_user_is_all_that_is_looked_at(server, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    inner = packed(("fr-en/train.de", b"eins\n"))
    (mine / "all.tgz").write_bytes(packed(("texts/a.tgz", inner)))
    remotes = [[Remote("a.tgz", (server.url + "a.tgz",)), Remote("all.tgz", (server.url + "all.tgz",))]]
    got = obtain(corpus(remotes), tmp_path / "cache", mine)
    assert got.files.find("train.de").read_bytes() == b"eins\n"
    assert got.fetched == []
    assert server.asked == []
    assert list(mine.iterdir()) == [mine / "all.tgz"]


def test_files_that_a_folder_lacks(tmp_path: Path) -> None:
    files = Finder([tmp_path])
    files.pair(["train.de"], ["train.en", "train.de-en.en"])
    message = str(not_found(corpus([[Remote("a.tgz", ())]]), files))
    assert message.splitlines() == [
        "corpus: files are missing. Looked in:",
        f"  {tmp_path}: looked here and in every folder below",
        "Wanted:",
        "  train.de (plain, .gz or .xz)",
        "  train.en or train.de-en.en (plain, .gz or .xz)",
        "  or the archives a.tgz",
        "Get them by hand from https://example.org/corpus",
        "then run:",
        "  attnbench prepare corpus --from DIR",
    ]
