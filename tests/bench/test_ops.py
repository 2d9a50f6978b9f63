"""What is counted of an attention that is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnbench.bench import ops


@pytest.mark.parametrize(("pattern", "wanted"), [
    ("full", 64.0), ({"kind": "window", "n": 8}, None), ({"kind": "block", "n": 8}, 8.0),
    ({"kind": "global", "n": 8}, None), ({"kind": "bigbird", "n": 8}, None), ({"kind": "random", "n": 8}, 8.0),
])  # fmt: skip
def test_keys_that_a_query_looks_at_are_those_that_get_weight(pattern: Any, wanted: float | None, monkeypatch):
    monkeypatch.setattr(ops, "_CELLS", 1000)  # some queries at a time
    method = ops.Method(pattern=pattern)
    found = ops.looked_at(method, 64, torch.device("cpu"))
    states = torch.zeros(1, 1, 64, ops.HEAD)
    values = torch.eye(64).expand(1, 1, 64, 64)  # a context then is the weights
    weights = ops.Mixer(method._replace(backend="dense"), 1, torch.device("cpu"))(states, states, values)
    assert found == pytest.approx(float((weights > 0).sum()) / 64)
    if wanted is not None:
        assert found == wanted
