"""The shapes that annotations promise are those that flow: a training and a search, each tensor checked on its way.

The rest of the suite runs without these checks, which would make it half as slow again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SPEC = Path(__file__).parents[1] / "golden" / "losses.yaml"
PROGRAM = """
import json, sys
from beartype import beartype
from beartype.roar import BeartypeDecorHintException
from jaxtyping import TypeCheckError, install_import_hook

checked, unchecked = set(), set()

def check(function):
    if not any("Tensor" in str(hint) for hint in function.__annotations__.values()):
        return function
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        guarded = beartype(function)
    except BeartypeDecorHintException:  # a hint that cannot be looked at when running, like Self
        unchecked.add(name)
        return function
    checked.add(name)
    return guarded

sys.modules["shapes"] = type(sys)("shapes")
sys.modules["shapes"].check = check
floors = ("core", "attention", "models", "data", "metrics", "search", "tasks", "train")
install_import_hook([f"attnbench.{floor}" for floor in floors], "shapes.check")

import torch
from attnbench.attention.scores.dot import dot
try:
    dot(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5))
    raise SystemExit("a wrong shape passes")
except TypeCheckError:
    pass

from attnbench.cli.app import app
search = ["--set", "search={kind: beam, size: 3, n_best: 2}", "--set", "train.max_steps=2"]
try:
    app(["--quiet", "ablate", sys.argv[1], *search], prog_name="attnbench")
except SystemExit as end:
    assert not end.code, end.code
json.dump([len(checked), sorted(unchecked)], open("shapes.json", "w"))
"""


def test_annotated_shapes_are_true(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SPEC.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(SPEC)], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    checked, unchecked = json.loads((tmp_path / "shapes.json").read_text())
    assert checked > 80
    assert not unchecked
