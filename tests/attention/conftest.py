"""What the tests of kernels share: an interpreter of Triton's that wastes less of their time, and the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attnbench.core.kernels import installed, interpreted


@pytest.fixture(scope="session", autouse=True)
def _interpreter_that_remembers() -> Iterator[None]:
    """Triton's interpreter makes the same types over and over, makes its language ready at every call of a helper, and
    counts in 64 bits what an assertion that is off would look at: a third of the time without that."""
    if not (installed() and interpreted()):
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    ready: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def begin(self: Any, *arguments: Any, **named: Any) -> Any:
        ready.clear()
        return launch(self, *arguments, **named)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in ready:  # the language, once a launch for each module that helpers lie in
            ready.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", begin)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype))
        patch.setattr(core.block_type, "__init__", _remembered(core.block_type.__init__, _of_block))
        patch.setattr(core.tensor, "__init__", _remembered(core.tensor.__init__, _of_tensor, "handle"))
        yield


def _by_name(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def made(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = make(kind)
        return known[kind.name]

    return made


def _of_block(element: Any, shape: Any) -> object:
    return element.name, *(getattr(each, "value", each) for each in shape)


def _of_tensor(_: Any, kind: Any) -> object:
    return kind.name


def _remembered(init: Callable[..., None], key: Callable[..., object], own: str = "") -> Callable[..., None]:
    """An `__init__` whose attributes are the same for the same key; but for `own`, the first argument."""
    known: dict[object, dict[str, Any]] = {}

    def make(self: Any, *arguments: Any) -> None:
        of = key(*arguments)
        made = known.get(of)
        if made is None:
            init(self, *arguments)
            known[of] = dict(vars(self))
            return
        vars(self).update(made)
        if own:
            setattr(self, own, arguments[0])

    return make


@pytest.fixture
def on_device() -> Iterator[None]:
    """Tensors are made where the kernels run."""
    with torch.device("cpu" if interpreted() else "cuda"):
        yield
