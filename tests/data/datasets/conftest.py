"""Files as the corpora are released, a few lines each."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from attnbench.data.corpus import Data
from attnbench.data.prepare import prepare
from attnbench.data.recipe import Recipe


class Given:
    """The folder that a user names with --from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def text(self, name: str, text: str) -> None:
        """A text file, packed if its name says so."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(text.encode()))

    def pack(self, name: str, members: Mapping[str, str | bytes]) -> bytes:
        """A tar archive."""
        with tarfile.open(self.folder / name, "w:gz") as archive:
            for member, content in members.items():
                data = content.encode() if isinstance(content, str) else content
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return (self.folder / name).read_bytes()


@pytest.fixture
def given(tmp_path: Path) -> Given:
    return Given(tmp_path / "given")


@pytest.fixture
def prepared(tmp_path: Path, given: Given) -> Callable[..., Data]:
    """Prepares a corpus from the given folder, with a vocabulary that a few lines can fill."""

    def make(dataset: object, **fields: object) -> Data:
        raw = {"dataset": dataset, "tokenizer": {"kind": "bpe", "vocab": 400}, **fields}
        path = prepare(Recipe.model_validate(raw), cache=tmp_path / "cache", source=given.folder)
        return Data.open(path)

    return make
