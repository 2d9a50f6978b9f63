"""What a result was made with: commit, versions, device, threads."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import attnbench
from attnbench.train.machine import facts
from attnbench.train.runtime import Runtime

_PACKAGES = ("torch", "numpy", "tokenizers", "sacrebleu", "sacremoses", "safetensors", "pydantic")


def git_state() -> tuple[str, bool]:
    """(commit, dirty) of the checkout this package runs from; ("", False) where it is no checkout."""
    here = Path(attnbench.__file__).resolve().parent
    try:
        top = Path(_git(here, "rev-parse", "--show-toplevel"))
        if top != here.parent:
            return "", False  # installed somewhere below another project's checkout
        return _git(here, "rev-parse", "HEAD"), bool(_git(top, "status", "--porcelain", "--", here.name))
    except (OSError, subprocess.SubprocessError):
        return "", False


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return done.stdout.strip()


def environment(runtime: Runtime) -> dict[str, Any]:
    """One attempt in the env.json of a run. Names no user and no path."""
    commit, dirty = git_state()
    return {
        "attnbench": attnbench.__version__,
        "commit": commit,
        "dirty": dirty,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        **facts(runtime),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }
