from __future__ import annotations

import bz2
import gzip
import lzma
import os
import threading
from pathlib import Path

import pytest

from attnbench.core.errors import DataError
from attnbench.data.lines import read_lines


def texts(path: Path) -> list[str]:
    return [line.text for line in read_lines(path)]


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, lzma.compress])
def test_plain_gzip_and_xz_are_told_by_their_content(tmp_path: Path, pack) -> None:
    path = tmp_path / "text"
    path.write_bytes(pack("ein Häuschen\nzwei\n".encode()))
    assert texts(path) == ["ein Häuschen", "zwei"]


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "text"
    odd = "a\u2028b\u2029c\x0bd\x0ce\x85f\x1cg\rh"
    path.write_bytes(f"\ufeff{odd}\r\nsecond\n\nlast".encode())
    assert texts(path) == [odd, "second", "", "last"]
    assert [line.number for line in read_lines(path)] == [1, 2, 3, 4]


def test_lines_that_end_in_cr_alone_are_no_lines(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"one\rtwo\rthree\r")
    with pytest.raises(
        DataError, match=r"text: its lines end in CR alone, so that all of it is one: tr .* < FILE > NEW"
    ):
        texts(tmp_path / "text")


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, lzma.compress])
def test_a_pipe_gives_all_that_is_in_it(pack) -> None:
    wanted = [f"line {number}" for number in range(3000)]
    reader, writer = os.pipe()
    content = pack("".join(f"{line}\n" for line in wanted).encode())
    feeder = threading.Thread(target=lambda: os.fdopen(writer, "wb").write(content) and None)
    feeder.start()
    assert texts(Path(f"/dev/fd/{reader}")) == wanted
    feeder.join()
    os.close(reader)


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"")
    assert texts(tmp_path / "text") == []


def test_bad_utf8_names_file_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "train.de"
    path.write_bytes(b"gut\nsch\xf6n\n")
    with pytest.raises(DataError, match=r"train\.de:2: not UTF-8 at byte 4 of the line \(0xf6\); .*iconv"):
        texts(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\nb\x00c\n", r":2: holds a NUL character"),
        ("wörter\n".encode("utf-16"), r"is UTF-16; convert it: iconv"),
    ],
)
def test_binary_and_utf16_are_told_apart(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "text"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        texts(path)


@pytest.mark.parametrize(("name", "pack"), [("a.gz", gzip.compress), ("a.xz", lzma.compress)])
def test_a_cut_off_archive_is_damaged(tmp_path: Path, name: str, pack) -> None:
    path = tmp_path / name
    whole = pack(b"".join(b"%d some line\n" % number for number in range(20000)))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name}: damaged after line \d+ .*fetch or copy it again"):
        texts(path)


def test_a_flipped_byte_in_an_archive_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    whole = bytearray(gzip.compress(b"".join(b"%d some line\n" % number for number in range(2000))))
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(bytes(whole))
    with pytest.raises(DataError, match=r"a\.gz: damaged after line"):
        texts(path)


def test_a_name_that_lies_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"plain text\n")
    with pytest.raises(DataError, match=r"a\.gz: is named \.gz but is not such a file"):
        texts(tmp_path / "a.gz")


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: cannot be read"):
        texts(tmp_path / "nowhere")


@pytest.mark.parametrize(("content", "packer"), [
    (bz2.compress(b"a b\n" * 50), "bzip2"), (b"PK\x03\x04rest", "zip"), (b"\x28\xb5\x2f\xfdrest", "zstd"),
])  # fmt: skip
def test_an_archive_that_is_not_read_is_named(tmp_path: Path, content: bytes, packer: str) -> None:
    (tmp_path / "a.de").write_bytes(content)
    with pytest.raises(DataError, match=f"a.de: is packed by {packer}; unpack it"):
        texts(tmp_path / "a.de")
