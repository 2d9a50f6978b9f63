"""One seed for Python, NumPy and torch; and seeds derived from names, so that streams do not mix."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (every device)."""
    random.seed(seed)
    np.random.seed(derive(seed, "numpy") % 2**32)
    torch.manual_seed(seed)


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on `seed` and every name: the same in every process and on every machine."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@contextmanager
def drawn_apart(*names: str) -> Iterator[None]:
    """What is drawn on the processor in the block comes from a stream of its own, and what is drawn later is what it
    would be without: models that differ in these parameters alone begin with the same others."""
    seed = derive(torch.initial_seed(), *names)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        yield
