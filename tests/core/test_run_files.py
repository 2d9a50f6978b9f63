from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.core.run_files import read_tests


def test_what_is_remembered_of_tests_is_read(tmp_path: Path):
    assert read_tests(tmp_path / "absent.json") == {}
    (tmp_path / "significance.json").write_text('{"test/bleu:1": 0.5, "test/bleu:2": 1, "test/bleu:3": 0}')
    assert read_tests(tmp_path / "significance.json") == {"test/bleu:1": 0.5, "test/bleu:2": 1.0, "test/bleu:3": 0.0}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff{}",
        b"[0.5]",
        b'{"a": null}',
        b'{"a": "x"}',
        b'{"a": true}',
        b'{"a": NaN}',
        b'{"a": 0.5, "b": 2}',
    ],
)
def test_nothing_is_remembered_of_a_damaged_file(tmp_path: Path, content: bytes):
    (tmp_path / "significance.json").write_bytes(content)
    assert read_tests(tmp_path / "significance.json") == {}
