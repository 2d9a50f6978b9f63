"""What a result was made with: commit, versions, device, threads."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

from attnbench.core.version import version
from attnbench.train.machine import facts
from attnbench.train.runtime import Runtime

_PACKAGES = ("torch", "numpy", "tokenizers", "sacrebleu", "sacremoses", "safetensors", "pydantic")


def environment(runtime: Runtime) -> dict[str, Any]:
    """One attempt in the env.json of a run. Names no user and no path."""
    return {
        **version(),
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        **facts(runtime),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }
