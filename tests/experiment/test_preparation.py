from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from attnbench.core.errors import SpecError
from attnbench.experiment.preparation import prepare_named


def test_a_corpus_is_prepared_by_its_name_or_a_spec(bench: Any):
    (by_spec,) = prepare_named(str(bench.spec()), [], bench.settings())
    assert by_spec["splits"]["train"]["pairs"] == 60
    (by_name,) = prepare_named("demo", ["pairs=60", "held_out=6"], bench.settings())
    assert by_name["path"] == by_spec["path"]
    with pytest.raises(SpecError, match="unknown dataset 'dem'; did you mean 'demo'"):
        prepare_named("dem", [], bench.settings())


def test_a_corpus_comes_before_a_file_of_its_name(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    spec = bench.spec().read_bytes()
    monkeypatch.chdir(tmp_path)
    Path("demo").write_text("what is this?")
    with caplog.at_level(logging.WARNING):
        (by_name,) = prepare_named("demo", ["pairs=60", "held_out=6"], bench.settings())
    assert "write ./demo for the file" in caplog.text
    Path("demo").write_bytes(spec)
    assert prepare_named("./demo", [], bench.settings()) == [by_name]
    Path("own").write_bytes(spec)
    assert prepare_named("own", [], bench.settings()) == [by_name]
