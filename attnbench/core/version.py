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
    here = _package()
    try:
        top = Path(_git(here, "rev-parse", "--show-toplevel"))
        if top != here.parent:
            return "", False  # installed somewhere below another project's checkout
        return _git(here, "rev-parse", "HEAD"), bool(_git(top, "status", "--porcelain", "--", here.name))
    except (OSError, subprocess.SubprocessError):
        return "", False


def _package() -> Path:
    return Path(attnbench.__file__).resolve().parent


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        # the checkout may be another user's, as in a container: its code runs already
        ["git", "-c", f"safe.directory={_package().parent}", "-C", str(folder), *arguments],
        capture_output=True, text=True, errors="surrogateescape", check=True, timeout=20,
    )  # fmt: skip
    return done.stdout.strip()
