"""What is measured of a machine, and what is chosen for it."""

from __future__ import annotations

import pytest
import torch

from attnbench.bench import machine
from attnbench.bench.machine import Roofline
from attnbench.train.runtime import Runtime


def test_the_better_of_two_measurements_counts():
    first, second = Roofline({"fp32": 1.0, "bf16": 4.0}, 5.0), Roofline({"fp32": 2.0, "bf16": 3.0}, 6.0)
    assert first.better_of(second) == Roofline({"fp32": 2.0, "bf16": 4.0}, 6.0)


@pytest.mark.parametrize(("used", "chosen"), [(True, "oneDNN"), (False, "the default library")])
def test_what_multiplies_is_told_as_it_is(used, chosen, monkeypatch):
    monkeypatch.setattr(machine, "use_onednn_float32", lambda: used)
    monkeypatch.setattr("attnbench.train.machine.onednn_in_use", lambda: used)
    found = {choice.what: choice for choice in machine.set_up(Runtime(torch.device("cpu")))}["float32 matrix products"]
    assert found.chosen.startswith(chosen)
    assert (found.gain is not None) is used
    assert machine.signature(Runtime(torch.device("cpu")))["products"] == ("oneDNN" if used else "default")


@pytest.mark.parametrize(("found", "chosen", "gain"), [
    (("code compiled here", 1.25), "weights packed, by code compiled here", 1.25),
    (("the matrix library", 0.8), "weights packed, by the matrix library", 1.25),
    (("the matrix library", None), "weights packed, by the matrix library", None),
    (("nothing", None), "weights as they are", None),
])  # fmt: skip
@pytest.mark.parametrize(("precision", "name"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_what_multiplies_in_searches_is_told_with_what_it_gives(found, chosen, gain, precision, name, monkeypatch):
    asked = []
    monkeypatch.setattr(machine.packed, "chosen", lambda dtype: asked.append(dtype) or found)
    choices = machine.set_up(Runtime(torch.device("cpu"), precision))
    told = {choice.what: choice for choice in choices}
    assert asked == [getattr(torch, name), torch.int8]
    assert told[f"{name} products of searches"][1:] == (chosen, gain)
    assert told["int8 products of searches"].chosen == f"by {found[0]}"
