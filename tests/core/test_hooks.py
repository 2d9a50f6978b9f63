"""Hooks of a module, and of all of them, are seen."""

from __future__ import annotations

import pytest
from torch import nn

from attnbench.core import hooks


@pytest.mark.parametrize(("name", "kinds"), [
    ("forward_pre", hooks.FORWARD), ("forward", hooks.FORWARD), ("full_backward_pre", hooks.BACKWARD),
    ("full_backward", hooks.BACKWARD),
])  # fmt: skip
def test_hooks_are_seen_where_they_are_and_no_longer(name, kinds):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    own = getattr(module, f"register_{name}_hook")(lambda *given: None)
    assert hooks.are_on(module)
    assert hooks.are_on(module, kinds)
    assert not hooks.are_on(other)
    assert not hooks.are_global()
    own.remove()
    everywhere = getattr(nn.modules.module, f"register_module_{name}_hook")(lambda *given: None)
    try:
        assert hooks.are_global()
        assert hooks.are_on(other, kinds)
    finally:
        everywhere.remove()
    assert not hooks.are_on(module)
    assert not hooks.are_global()
