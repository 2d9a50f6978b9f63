"""Whether what is computed may wait for the GPU: a record of its work (train/recorded.py) cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

REFUSED = "this waits for the GPU, or draws what a record cannot"
_forbidden: ContextVar[bool] = ContextVar("attnbench-waiting", default=False)


@contextmanager
def forbid() -> Iterator[None]:
    """What waits in the block takes another way, if it knows one. What autograd calls later: see core/carried.py."""
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


def forbidden() -> bool:
    """Whether a `forbid` block is open here."""
    return _forbidden.get()


def refuse() -> None:
    """Raise RuntimeError where waiting is forbidden: there is no other way."""
    if forbidden():
        raise RuntimeError(REFUSED)
