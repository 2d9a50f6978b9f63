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
    if not (here.parent / ".git").exists():
        return "", False  # installed, perhaps somewhere below another project's checkout
    try:
        return _git(here.parent, "rev-parse", "HEAD"), bool(_git(here.parent, "status", "--porcelain", "--", here.name))
    except (OSError, subprocess.SubprocessError):
        return "", False


def _git(top: Path, *arguments: str) -> str:
    """The folder is named, not looked for: git refuses to find one of another user, as in a container. Its code runs
    already."""
    done = subprocess.run(
        ["git", "-C", str(top), "--git-dir", str(top / ".git"), "--work-tree", str(top), *arguments],
        capture_output=True, text=True, errors="replace", check=True, timeout=20,
    )  # fmt: skip
    return done.stdout.strip()
