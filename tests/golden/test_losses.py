"""Losses of twenty updates, compared with those on file.

Same parameters, same random draws, same data, same arithmetic: the losses agree to rounding, which differs between
processors and grows from step to step, so they are compared to 1e-4 of their size. After a change that is meant to
move them, delete losses.json and run this test: it writes the file anew, and fails once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnbench.core.files import read_jsonl

HERE = Path(__file__).parent
FILE = HERE / "losses.json"


def test_losses_are_those_on_file(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    invoke("ablate", HERE / "losses.yaml")
    found = {}
    for cell in sorted(Path("runs/losses/cells").iterdir()):
        lines = read_jsonl(cell / "metrics.jsonl")
        found[cell.name.split("-")[0]] = {
            "loss": [line["train/loss"] for line in lines if "train/loss" in line],
            "gradient": [line["train/grad_norm"] for line in lines if "train/grad_norm" in line],
            "valid": [line["valid/loss"] for line in lines if "valid/loss" in line],
        }
    assert all(len(each["loss"]) == 20 and len(each["valid"]) == 1 for each in found.values())
    assert found["softmax"]["loss"][-1] < found["softmax"]["loss"][0] - 0.5
    if not FILE.exists():
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        pytest.fail(f"{FILE.name} was written anew; look at what changed, and keep it if that was meant")
    wanted = json.loads(FILE.read_text())
    assert found.keys() == wanted.keys()
    for label, curves in wanted.items():
        for name, values in curves.items():
            assert found[label][name] == pytest.approx(values, rel=1e-4), (label, name)
