"""The smallest experiment that goes all the way: four updates of a model that is eight wide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY = {
    "task.dataset": "{kind: demo, pairs: 60, held_out: 6}",
    "task.tokenizer": "{kind: word, source_vocab: 128, target_vocab: 288}",
    "model.width": 8, "model.layers": 1, "model.heads": 2, "model.ffn": 8,
    "train.max_steps": 4, "train.validate_every": 2, "train.log_every": 1, "train.batch_tokens": 200,
    "search": "greedy",
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Arguments that shrink the packaged demo; the test works in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return [word for path, value in TINY.items() for word in ("--set", f"{path}={value}")]


@pytest.fixture
def tree() -> Callable[..., dict[str, Any]]:
    """Every file below a folder with its content, to tell whether anything changed."""

    def look(folder: Path) -> dict[str, Any]:
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }

    return look
