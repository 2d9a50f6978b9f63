"""Three kills of a tiny training; experiments/robustness has the script and the results of fifty."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "robustness" / "kill_and_resume.py"


def test_killed_at_any_moment_and_resumed_it_ends_as_if_left_in_peace(bench: Any):
    spec = bench.spec({"train": {"max_steps": 8}, "grid": {}, "model": {"attention": {"default": {"budget": 2}}}})
    out = bench.folder / "kills.json"
    command = [sys.executable, SCRIPT, "--kills", "3", "--seed", "4", "--warm", "--spec", spec, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["equal"]
    assert sum(report["while"].values()) == 3


def test_the_results_of_fifty_kills_are_kept():
    report = json.loads(SCRIPT.with_suffix(".json").read_text())
    assert report["kills"] >= 50
    assert report["equal"]
