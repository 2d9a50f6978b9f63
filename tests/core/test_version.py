"""The commit of a checkout, of which a result is made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import attnbench
from attnbench.core.version import git_state, version


def test_the_version_is_that_of_the_package():
    assert version()["attnbench"] == attnbench.__version__


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_a_checkout_with_changes_is_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "repository" / "attnbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(attnbench, "__file__", str(package / "__init__.py"))
    assert git_state() == ("", False)
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "x")
    commit, dirty = git_state()
    assert (len(commit), dirty) == (40, False)
    (package.parent / "notes.txt").write_text("beside the package")
    assert git_state() == (commit, False)
    (package / "__init__.py").write_text("changed = True\n")
    assert git_state() == (commit, True)


def test_a_checkout_of_another_user_has_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a container."""
    package = tmp_path / "repository" / "attnbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-qm", "x")
    monkeypatch.setattr(attnbench, "__file__", str(package / "__init__.py"))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert len(git_state()[0]) == 40


def test_a_package_below_another_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    git(tmp_path, "init", "-q")
    package = tmp_path / "lib" / "site-packages" / "attnbench"
    package.mkdir(parents=True)
    monkeypatch.setattr(attnbench, "__file__", str(package / "__init__.py"))
    assert git_state() == ("", False)
