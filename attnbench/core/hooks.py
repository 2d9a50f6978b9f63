"""Whether somebody watches modules by hooks: fast paths that go around a module's `forward` would not call them."""

from __future__ import annotations

from typing import Any

from torch import nn

FORWARD = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_modules: Any = nn.modules.module  # whose hooks of all modules have no public name


def are_global(kinds: tuple[str, ...] = FORWARD + BACKWARD) -> bool:
    """Whether hooks of these kinds are registered for all modules."""
    return any(getattr(_modules, f"_global{kind}") for kind in kinds)


def are_on(module: nn.Module, kinds: tuple[str, ...] = FORWARD + BACKWARD) -> bool:
    """Whether hooks of these kinds are registered for this module, by itself or with all."""
    return are_global(kinds) or any(getattr(module, kind) for kind in kinds)
