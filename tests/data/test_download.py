from __future__ import annotations

import gzip
import hashlib
import logging
import lzma
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attnbench.data.datasets.base import Remote
from attnbench.data.download import Progress, Unavailable, fetch

DATA = b"some line\n" * 5000


def checksum(algorithm: str) -> str:
    return f"{algorithm}:{hashlib.new(algorithm, DATA).hexdigest()}"


@pytest.fixture
def served(server):
    (server.folder / "train.de").write_bytes(DATA)
    return server


def remote(server, *paths: str, known: str | None = None, size: int | None = None) -> Remote:
    return Remote("train.de", tuple(server.url + path for path in paths), known, size)


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_a_file_is_fetched_once_and_checked(served, tmp_path: Path, algorithm: str) -> None:
    wanted = remote(served, "train.de", known=checksum(algorithm))
    first = fetch(wanted, tmp_path)
    assert first.path.read_bytes() == DATA
    assert first.sha256 == hashlib.sha256(DATA).hexdigest()
    assert fetch(wanted, tmp_path) == first
    assert fetch(wanted, tmp_path, offline=True) == first
    assert served.asked == ["/train.de"]


def test_mirrors_are_tried_in_turn(served, tmp_path: Path) -> None:
    got = fetch(remote(served, "gone/train.de", "cut/train.de", "train.de", known=checksum("sha256")), tmp_path)
    assert got.url.endswith("/train.de")
    assert got.path.read_bytes() == DATA
    assert [path.rsplit("/", 1)[0] for path in served.asked] == ["/gone", "/cut", "/cut", ""]


def test_every_failure_is_told_with_its_url_and_leaves_nothing(served, tmp_path: Path) -> None:
    wrong = "sha256:" + "0" * 64
    with pytest.raises(Unavailable) as caught:
        fetch(remote(served, "gone", "cut/train.de", "train.de", known=wrong), tmp_path)
    why = [reason for _, reason in caught.value.tried]
    assert why[0] == "the server answers 404"
    assert "IncompleteRead" in why[1]
    assert why[2].startswith("wrong checksum: ")
    assert wrong.removeprefix("sha256:") in why[2]
    assert checksum("sha256").removeprefix("sha256:") in why[2]
    assert left_of(tmp_path) == []


def left_of(cache: Path) -> list[str]:
    """What is in the cache, locks aside."""
    files = (path for path in cache.rglob("*") if path.is_file() and "served" not in path.parts)
    return sorted(path.name for path in files if path.suffix != ".lock")


def test_no_server_at_all(server, tmp_path: Path) -> None:
    server.close()
    with pytest.raises(Unavailable, match="Connection refused"):
        fetch(remote(server, "train.de"), tmp_path)


def test_a_spoilt_file_in_the_cache_is_fetched_again(served, tmp_path: Path) -> None:
    wanted = remote(served, "train.de", known=checksum("md5"))
    fetch(wanted, tmp_path).path.write_bytes(b"spoilt")
    with pytest.raises(Unavailable, match="offline, and not in the cache"):
        fetch(wanted, tmp_path, offline=True)
    assert fetch(wanted, tmp_path).path.read_bytes() == DATA


def test_offline_asks_nobody(served, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="offline"):
        fetch(remote(served, "train.de"), tmp_path, offline=True)
    assert served.asked == []


def test_an_unknown_checksum_is_recorded_with_a_warning_and_holds_from_then_on(
    served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = remote(served, "train.de")
    got = fetch(wanted, tmp_path)
    assert f"recorded the one seen: {checksum('sha256')}" in caplog.text
    assert (got.path.parent / "train.de.sha256").read_text().strip() == got.sha256
    got.path.write_bytes(b"spoilt")
    caplog.clear()
    assert fetch(wanted, tmp_path).path.read_bytes() == DATA
    assert "no checksum" not in caplog.text
    got.path.unlink()
    (served.folder / "train.de").write_bytes(b"renewed")
    with pytest.raises(
        Unavailable, match=r"wrong checksum: .*train\.de\.sha256 is of the file seen first: delete it to"
    ):
        fetch(wanted, tmp_path)
    (got.path.parent / "train.de.sha256").unlink()
    assert fetch(wanted, tmp_path).path.read_bytes() == b"renewed"


def test_what_killed_downloads_left_is_swept_up_and_two_at_once_make_one(served, tmp_path: Path) -> None:
    wanted = remote(served, "train.de", known=checksum("sha256"))
    folder = fetch(wanted, tmp_path).path.parent
    (folder / "train.de").unlink()
    (folder / "tmpabcd_123").write_bytes(b"half")
    served.asked.clear()
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda _: fetch(wanted, tmp_path).path.read_bytes(), range(2)))
    assert got == [DATA, DATA]
    assert served.asked == ["/train.de"]
    assert left_of(tmp_path) == ["train.de"]


def test_a_size_is_checked_where_no_checksum_is_known(served, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"wrong size: 50,000 bytes in place of 49,999"):
        fetch(remote(served, "train.de", size=49_999), tmp_path)
    assert fetch(remote(served, "train.de", size=50_000), tmp_path).path.exists()


PAGE = b"\n <!DOCTYPE HTML>\n<HTML><body>please log in</body></html>\n"


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_what_is_packed_is_read_to_its_end_where_no_checksum_is_known(server, tmp_path: Path, pack) -> None:
    name, whole = f"train.de.{'gz' if pack is gzip.compress else 'xz'}", pack(DATA)
    bad = {"page": PAGE, "half": whole[:-9], "plain": DATA, "spoilt": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]}
    for folder, data in {**bad, "good": whole}.items():
        (server.folder / folder).mkdir()
        (server.folder / folder / name).write_bytes(data)
    got = fetch(Remote(name, tuple(f"{server.url}{folder}/{name}" for folder in (*bad, "good"))), tmp_path)
    assert got.url == f"{server.url}good/{name}"
    assert got.path.read_bytes() == whole
    assert left_of(tmp_path) == [name, f"{name}.sha256"]
    with pytest.raises(Unavailable, match=r"what it sent cannot be unpacked \(.*\); it begins with"):
        fetch(Remote(name, (f"{server.url}half/{name}",)), tmp_path)


@pytest.mark.parametrize("page", [PAGE, b"\xef\xbb\xbf<html lang='en'>", b"\t<Html>"])
def test_a_page_in_place_of_a_text_sends_on_to_the_next_mirror(served, tmp_path: Path, page: bytes) -> None:
    (served.folder / "page").mkdir()
    (served.folder / "page" / "train.de").write_bytes(page)
    assert fetch(remote(served, "page/train.de", "train.de"), tmp_path).path.read_bytes() == DATA
    with pytest.raises(Unavailable, match="what it sent is a page of a website; it begins with"):
        fetch(remote(served, "page/train.de"), tmp_path)


@pytest.mark.parametrize("given", [b'<!DOCTYPE srcset SYSTEM "ftp://x">\n<srcset>', b"<htmlike> <html>", b""])
def test_a_text_with_other_markup_is_no_page(served, tmp_path: Path, given: bytes) -> None:
    (served.folder / "train.de").write_bytes(given)
    assert fetch(remote(served, "train.de"), tmp_path).path.read_bytes() == given


def test_progress_tells_each_tenth(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "attnbench")
    progress = Progress("train.de")
    progress.total = 1000
    for _ in range(100):
        progress.update(10)
    shares = [record.getMessage().rsplit("(")[-1] for record in caplog.records]
    assert shares == [f"{ten}%)" for ten in range(10, 101, 10)]
