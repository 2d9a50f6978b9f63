"""A mechanism is one new file: what the README shows, done to a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnbench

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "data" / "rectified.py"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, and in it the new file."""
    folder = tmp_path_factory.mktemp("house")
    package = Path(attnbench.__file__).parent
    shutil.copytree(package, folder / "attnbench", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FILE, folder / "attnbench" / "attention" / "transforms")
    return folder


def run(house: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(house), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=house,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_listed_read_from_yaml_and_swept(house):
    (house / "spec.yaml").write_text(
        "name: mine\n"
        "task: {kind: translation, dataset: demo}\n"
        "model:\n  kind: transformer\n  tie: decoder\n"
        "  attention: {default: {transform: rectified}, cross: {transform: {kind: rectified, k: 3}}}\n"
    )
    program = """
import io, json, sys
from contextlib import redirect_stdout
from attnbench.cli.app import app
def call(*words):
    with redirect_stdout(io.StringIO()) as out:
        app(words, standalone_mode=False)
    return json.loads(out.getvalue())
json.dump([call("list", "mechanisms", "rectified", "--json"), call("ablate", "spec.yaml", "--dry-run", "--json"),
           call("sweep-k", "spec.yaml", "--k", "2,4,inf", "--dry-run", "--json")], sys.stdout)
"""
    (entry,), plain, swept = json.loads(run(house, "-c", program))
    assert entry["kind"] == "transform"
    assert list(entry["parameters"]) == ["k"]
    kept = {role: site["transform"].get("k") for role, site in plain["spec"]["model"]["attention"].items()}
    assert kept == {"encoder_self": 8, "decoder_self": 8, "cross": 3}
    assert [cell["label"].split("-")[-1] for cell in swept["cells"]] == ["2", "4", "inf"]
    assert swept["spec"]["model"]["attention"]["encoder_self"]["transform"] == {"kind": "rectified", "k": 2}


def test_the_laws_run_on_it_and_hold(house):
    laws = [str(ROOT / "tests" / "conformance" / f"test_{floor}.py") for floor in ("transforms", "attention", "models")]
    found = run(house, "-m", "pytest", "-p", "no:cacheprovider", *laws, "-k", "rectified")
    assert int(re.search(r"(\d+) passed", found)[1]) > 60
    assert "skipped" not in found


def test_the_readme_shows_the_file_as_it_is():
    assert FILE.read_text(encoding="utf-8") in (ROOT / "README.md").read_text(encoding="utf-8")
