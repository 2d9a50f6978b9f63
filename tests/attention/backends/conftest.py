"""What the tests of kernels share: an interpreter of Triton's that wastes less of their time, and the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnbench.attention.backends import fused


@pytest.fixture(autouse=True)
def _language_made_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter makes its language ready at every call of a helper: here once a launch for each module that
    helpers lie in, in two thirds of the time."""
    if fused.kernels() is None or not fused.interpreted():
        return
    from triton.runtime import interpreter

    ready: set[int] = set()

    launch = interpreter.GridExecutor.__call__

    def begin(self: Any, *arguments: Any, **named: Any) -> Any:
        ready.clear()
        return launch(self, *arguments, **named)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in ready:
            ready.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", begin)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


@pytest.fixture
def on_device() -> Iterator[None]:
    """Tensors are made where the kernels run."""
    with torch.device("cpu" if fused.interpreted() else "cuda"):
        yield
