"""Functions that autograd calls again, in a thread of its own, with what was set where they were first called."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def carried(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function in the context variables of this call (native.off, waiting.forbid), wherever it is run."""
    context = contextvars.copy_context()

    def run(*given: object) -> Result:
        return context.copy().run(function, *given)

    return run
