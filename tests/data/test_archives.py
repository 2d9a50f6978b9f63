from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from attnbench.core.errors import DataError
from attnbench.data.archives import is_archive, unpack


def tar(path: Path, *members: tuple[str, bytes], link: str | None = None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        if link is not None:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            archive.addfile(info)
    return path


@pytest.fixture(autouse=True, params=["filter", "without"])
def _both(request, monkeypatch) -> None:
    """Python before 3.11.4 has no filter."""
    if request.param == "without":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


def test_nested_members_come_out_once(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tgz", ("de-en/train.de", b"eins\n"))
    folder = unpack(path, tmp_path / "raw")
    assert (folder / "de-en/train.de").read_bytes() == b"eins\n"
    (folder / "mark").touch()
    assert (unpack(path, tmp_path / "raw") / "mark").exists()


def test_another_archive_of_the_same_name_gets_its_own_folder(tmp_path: Path) -> None:
    first = unpack(tar(tmp_path / "a.tgz", ("x", b"1")), tmp_path / "raw")
    second = unpack(tar(tmp_path / "a.tgz", ("x", b"2")), tmp_path / "raw")
    assert first != second
    assert (second / "x").read_bytes() == b"2"


@pytest.mark.parametrize("member", ["../outside", "a/../../outside"])
def test_members_outside_are_refused_and_nothing_is_left(tmp_path: Path, member: str) -> None:
    with pytest.raises(DataError, match=r"bad\.tgz: damaged or unsafe archive"):
        unpack(tar(tmp_path / "bad.tgz", ("good", b""), (member, b"")), tmp_path / "raw")
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr(member, "")
    with pytest.raises(DataError, match="lies outside"):
        unpack(tmp_path / "bad.zip", tmp_path / "raw")
    assert list((tmp_path / "raw").iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_links_to_the_outside_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unsafe archive"):
        unpack(tar(tmp_path / "bad.tgz", link="/etc/passwd"), tmp_path / "raw")


def test_a_cut_off_archive_is_damaged(tmp_path: Path) -> None:
    import random

    path = tar(tmp_path / "a.tgz", ("x", random.Random(1).randbytes(100_000)))
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(DataError, match=r"a\.tgz: damaged or unsafe archive .*fetch it again"):
        unpack(path, tmp_path / "raw")
    assert list((tmp_path / "raw").iterdir()) == []


def test_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("SETIMES.en-ro.ro", "unu\n")
    assert (unpack(tmp_path / "a.zip", tmp_path / "raw") / "SETIMES.en-ro.ro").read_text() == "unu\n"


def test_names() -> None:
    assert is_archive("a.tar.gz")
    assert is_archive("a.tgz")
    assert not is_archive("train.de.gz")
