from __future__ import annotations

import io
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from attnbench.core.errors import DataError
from attnbench.data.archives import damage, is_archive, unpack


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


def left(folder: Path) -> list[str]:
    """What unpacking left, but for its locks."""
    return [path.name for path in (folder / "raw").iterdir() if path.suffix != ".lock"]


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
    assert left(tmp_path) == []
    assert not (tmp_path / "outside").exists()


def test_links_to_the_outside_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unsafe archive"):
        unpack(tar(tmp_path / "bad.tgz", link="/etc/passwd"), tmp_path / "raw")


def test_a_cut_off_archive_is_damaged(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tgz", ("x", random.Random(1).randbytes(100_000)))
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(DataError, match=r"a\.tgz: damaged or unsafe archive .*fetch it again"):
        unpack(path, tmp_path / "raw")
    assert left(tmp_path) == []


def test_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("SETIMES.en-ro.ro", "unu\n")
    assert (unpack(tmp_path / "a.zip", tmp_path / "raw") / "SETIMES.en-ro.ro").read_text() == "unu\n"


def test_names() -> None:
    assert is_archive("a.tar.gz")
    assert is_archive("a.tgz")
    assert not is_archive("train.de.gz")


def test_a_spoilt_byte_is_damage_wherever_it_stands(tmp_path: Path) -> None:
    """tarfile reads neither the checksum of what is packed nor anything behind a member that it cannot read."""
    rng = random.Random(1)
    members = [(f"part-{n}", rng.randbytes(3000).hex().encode()) for n in range(4)]
    whole = tar(tmp_path / "a.tgz", *members).read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    packed = (tmp_path / "a.zip").read_bytes()
    for trial in range(20):
        for name, data in (("a.tgz", whole), ("a.zip", packed[: packed.rindex(b"part-3")])):
            spoilt = bytearray(data)
            spoilt[rng.randrange(60, len(data) - 8)] ^= 1 << rng.randrange(8)
            path = tmp_path / str(trial) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(spoilt)
            with pytest.raises(DataError, match="damaged or unsafe archive"):
                unpack(path, tmp_path / "raw")
    assert left(tmp_path) == []


@pytest.mark.parametrize("suffix", ["tgz", "tar", "tar.xz", "zip"])
def test_a_page_or_an_archive_without_its_end_is_none(tmp_path: Path, suffix: str) -> None:
    page = tmp_path / f"page.{suffix}"
    page.write_text("<html>sign in</html>\n" * 200)
    with pytest.raises(DataError, match="damaged or unsafe archive"):
        unpack(page, tmp_path / "raw")
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        info = tarfile.TarInfo("x")
        info.size = 512
        archive.addfile(info, io.BytesIO(b"x" * 512))
    cut = tmp_path / "cut.tar"
    cut.write_bytes((tmp_path / "whole.tar").read_bytes()[:1024])  # its member, and nothing behind it
    with pytest.raises(DataError, match="lacks its end"):
        unpack(cut, tmp_path / "raw")


def test_a_header_that_cannot_be_read_is_not_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in "abc":
            info = tarfile.TarInfo(name)
            info.size = 512
            archive.addfile(info, io.BytesIO(b"x" * 512))
    data = bytearray(path.read_bytes())
    data[2 * 1024] ^= 1  # the name of c, which its header's sum is of
    path.write_bytes(data)
    with pytest.raises(DataError, match="the member at byte 2,048 cannot be read"):
        unpack(path, tmp_path / "raw")
    assert "2,048" in str(damage(path))


@pytest.mark.parametrize("name", ["a.tgz", "a.tar", "a.tar.xz"])
@pytest.mark.parametrize(
    ("packing", "behind"),  # tarfile reads nothing behind xz, and zeros alone behind gzip
    [("", b""), ("", b"junk"), ("gz", b""), ("gz", b"\0" * 512), ("xz", b""), ("bz2", b""), ("bz2", b"junk")],
)
def test_how_it_is_packed_is_told_by_its_content(tmp_path: Path, packing: str, name: str, behind: bytes) -> None:
    """A server may unpack what it sends; and tools leave alone what stands behind the end."""
    path = tmp_path / name
    with tarfile.open(path, f"w:{packing}") as archive:
        info = tarfile.TarInfo("x")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    path.write_bytes(path.read_bytes() + behind)
    assert damage(path) is None
    assert (unpack(path, tmp_path / "raw") / "x").read_bytes() == b"abc"


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tgz", ("x", b"1"))
    name = unpack(path, tmp_path / "elsewhere").name
    (tmp_path / "raw" / f".{name}.01234567~").mkdir(parents=True)
    unpack(path, tmp_path / "raw")
    assert left(tmp_path) == [name]


def test_a_dangling_link_inside_is_no_fault(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tar(tmp_path / "a.tgz", ("x", b"1"), link="nowhere")
    if "without" in request.node.name:
        with pytest.raises(DataError, match="is a link"):
            unpack(path, tmp_path / "raw")
    else:
        assert (unpack(path, tmp_path / "raw") / "x").read_bytes() == b"1"
