"""Which version of this package runs: its number, and the commit of its checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import attnbench


def version() -> dict[str, Any]:
    """As results hold it."""
    commit, dirty = git_state()
    return {"attnbench": attnbench.__version__, "commit": commit, "dirty": dirty}


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
