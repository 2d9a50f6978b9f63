"""What is counted of an attention that is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.bench import ops

CPU = torch.device("cpu")


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


def test_what_goes_both_ways_gives_each_input_its_gradient():
    seen = []

    def noted(left, right):
        for each in (left, right):
            each.register_hook(lambda slope: seen.append(slope.clone()))
        return left * 2 + right * 3

    left, right, upstream = torch.ones(4), torch.ones(4), torch.arange(4.0)
    ops.both_ways(noted, left, right, upstream=upstream)()
    assert sorted(slope.sum().item() for slope in seen) == [12.0, 18.0]
    assert left.grad is right.grad is None  # nothing is added up from call to call


@pytest.mark.parametrize("make", [
    lambda: ops.transform_cases(((2, 2, 3, 5),), CPU, []),
    lambda: ops.attention_cases(((2, 2, 9, 9),), CPU, torch.float32, n=2),
])  # fmt: skip
def test_cases_do_what_their_groups_say(make, monkeypatch):
    """Forward alone without a graph; both ways by `both_ways`."""
    both = []
    monkeypatch.setattr(ops, "both_ways", lambda function, *given, upstream: both.append(function) or both[-1])
    cases = list(make())
    there, back = ([case for case in cases if case.group.endswith(end)] for end in (", forward", " and backward"))
    assert [case.name for case in there] == [case.name for case in back]
    assert len(there) > 8
    assert len(there) + len(back) == len(cases)
    assert [case.run for case in back] == both
    for case in there:
        assert not case.run().requires_grad


def test_operations_and_bytes_are_counted():
    query, key, value = (torch.randn(1, 2, 16, ops.HEAD, requires_grad=True) for _ in range(3))
    for both in (False, True):
        with FlopCounterMode(display=False) as counter:
            context = (query @ key.mT).softmax(-1) @ value
            if both:
                context.sum().backward()
        assert ops.multiplied(ops.Method(), 2, 16, CPU, both=both) == counter.get_total_flops()
    scores = torch.randn(3, 5)
    assert ops.moved(scores, both=False) == 2 * 15 * 4  # read, written
    assert ops.moved(scores, both=True) == 5 * 15 * 4


def test_a_check_that_has_nothing_to_compare_with_is_none():
    """Torch's own softmax is what the others are timed beside; a check of it with itself could not fail."""
    cases = [*ops.transform_cases(((2, 2, 3, 5),), CPU, []), *ops.attention_cases(((2, 2, 9, 9),), CPU, torch.float32)]
    assert {case.name for case in cases if case.check is None} == {ops.BASELINE}
