"""What a result was made with: commit, versions, device, threads."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from attnbench.core.version import version
from attnbench.train.machine import facts
from attnbench.train.runtime import Runtime

_PACKAGES = ("torch", "numpy", "tokenizers", "sacrebleu", "sacremoses", "safetensors", "pydantic")


_DIGITS = ("device", "processor", "instructions", "threads", "precision", "products", "compiled", "updates", "tf32")
"""What the last digits of a training depend on, beside torch."""


def changed_arithmetic(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What lets the second of two attempts at one training go on to other last digits than the first had come to:
    `threads 2, before 1`. What the first did not note is left out."""
    was, found = (
        {name: given[name] for name in (*_DIGITS, "torch") if name in given}
        for given in ({**attempt, **attempt.get("packages", {})} for attempt in (before, now))
    )
    return [
        f"{name} {found[name] or 'none'}, before {was[name] or 'none'}"
        for name in was
        if name in found and was[name] != found[name]
    ]


def environment(runtime: Runtime) -> dict[str, Any]:
    """One attempt in the env.json of a run. Names no user and no path."""
    return {
        **version(),
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        **facts(runtime),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }
