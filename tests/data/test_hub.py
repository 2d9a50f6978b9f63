from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.errors import DataError
from attnbench.data import hub as module
from attnbench.data.hub import Hub, from_hub

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def table(path: Path, rows: list[dict]) -> str:
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_both_shapes_of_rows_become_aligned_files(tmp_path: Path) -> None:
    nested = table(tmp_path / "a.parquet", [{"translation": {"de": "ja\nja", "en": "yes\u2028yes"}}])
    flat = table(tmp_path / "b.parquet", [{"de": "nein", "en": "no"}, {"de": "", "en": "empty"}])
    for name, file, lines in (("train", nested, ["ja ja\n", "yes yes\n"]), ("test", flat, ["nein\n\n", "no\nempty\n"])):
        folder = from_hub(Hub({name: file}), ("de", "en"), tmp_path / f"out {name}")
        assert [(folder / f"{name}.{language}").read_text(encoding="utf-8") for language in ("de", "en")] == lines


def test_other_languages_and_absent_files_are_told_and_leave_nothing(tmp_path: Path) -> None:
    flat = table(tmp_path / "b.parquet", [{"de": "nein", "en": "no"}])
    with pytest.raises(DataError, match="rows hold de, en, not fr and en"):
        from_hub(Hub({"train": flat}), ("fr", "en"), tmp_path / "out")
    with pytest.raises(DataError):
        from_hub(Hub({"train": str(tmp_path / "absent.parquet")}), ("de", "en"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["b.parquet"]


def test_two_at_once_make_it_once_and_what_a_killed_one_left_is_swept_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    write = module._write

    def slowly(*args: Any) -> None:
        made.append(1)
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(module, "_write", slowly)
    (tmp_path / ".out.01234567~").mkdir()
    hub = Hub({"train": table(tmp_path / "b.parquet", [{"de": "nein", "en": "no"}])})
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda _: from_hub(hub, ("de", "en"), tmp_path / "out"), range(2)))) == 2
    assert made == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.parquet", "out", "out.lock"]
