"""What is measured of a machine, and what is chosen for it."""

from __future__ import annotations

import itertools

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
    assert (found.gain, found.than) == (pytest.approx(found.gain), "without") if used else (None, "oneDNN")
    assert machine.signature(Runtime(torch.device("cpu")))["products"] == ("oneDNN" if used else "default")


def test_a_library_that_is_refused_is_told_with_what_it_would_give(monkeypatch):
    monkeypatch.setattr(machine, "use_onednn_float32", lambda: False)
    monkeypatch.setattr(machine, "onednn_gain", lambda: 0.5)
    found = {choice.what: choice for choice in machine.set_up(Runtime(torch.device("cpu")))}["float32 matrix products"]
    assert found.chosen.startswith("the default library")
    assert (found.gain, found.than) == (2.0, "oneDNN")


def test_what_else_is_chosen_is_told_with_what_it_gives(monkeypatch):
    monkeypatch.setattr(machine.native, "engine", lambda: "g++ 13")
    found = {choice.what: choice for choice in machine.set_up(Runtime(torch.device("cpu")))}
    for what, than in (
        ("int8 products of searches", "those of float32"), ("freed memory", "without"),
        ("transforms, and steps of decoding", "torch's (entmax-1.5)"),
    ):  # fmt: skip
        assert found[what].gain > 0
        assert found[what].than == than
    monkeypatch.setattr(machine.native, "engine", lambda: None)
    found = {choice.what: choice for choice in machine.set_up(Runtime(torch.device("cpu")))}
    assert found["transforms, and steps of decoding"][1:3] == ("torch operations", None)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_told_with_what_they_give_and_stay_as_they_were(threads, monkeypatch):
    before, seen, times = torch.get_num_threads(), [], itertools.count(1)
    monkeypatch.setattr(machine, "_fastest", lambda run, device: seen.append(torch.get_num_threads()) or next(times))
    try:
        torch.set_num_threads(threads)
        gain, than = machine._of_threads(torch.device("cpu"))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert (gain, than, seen) == ((None, "", []) if threads == 1 else (2.0, "one, a product of matrices", [2, 1]))


OWN, LIBRARY = "weights packed by code compiled here", "weights packed by the matrix library"


@pytest.mark.parametrize(("found", "chosen", "gain", "than"), [
    (("code compiled here", 1.25), "weights packed, by code compiled here", 1.25, LIBRARY),
    (("the matrix library", 0.8), "weights packed, by the matrix library", 1.25, OWN),
    (("the matrix library", None), "weights packed, by the matrix library", None, OWN),
    (("nothing", None), "weights as they are", None, ""),
])  # fmt: skip
@pytest.mark.parametrize(("precision", "name"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_what_multiplies_in_searches_is_told_with_what_it_gives(
    found, chosen, gain, than, precision, name, monkeypatch
):
    asked = []
    monkeypatch.setattr(machine.packed, "chosen", lambda dtype: asked.append(dtype) or found)
    choices = machine.set_up(Runtime(torch.device("cpu"), precision))
    told = {choice.what: choice for choice in choices}
    assert asked == [getattr(torch, name), torch.int8]
    assert told[f"{name} products of searches"][1:] == (chosen, gain, than)
    assert told["int8 products of searches"].chosen == f"by {found[0]}"


def test_the_roofline_is_what_was_done_in_the_least_time(monkeypatch):
    monkeypatch.setattr(machine, "_SIDE", {"cpu": 10})
    monkeypatch.setattr(machine, "_BYTES", {"cpu": 1000})
    times = itertools.cycle([0.5, 0.25, 1.0])
    monkeypatch.setattr(machine, "seconds", lambda run, calls, device: next(times))
    found = machine.roofline(torch.device("cpu"))
    assert found.flops["fp32"] == 2 * 10**3 / 0.25
    assert found.bandwidth == 2 * 1000 / 0.25  # read and written


def test_yardsticks_count_what_they_do():
    whole = machine.products(torch.device("cpu"), torch.float32)
    assert whole.cost == 2 * 1024**3
    assert whole.run().shape == (1024, 1024)
    scores = torch.randn(3, 5)
    moved = machine.copies(scores)
    assert moved.cost == 2 * 15 * 4
    assert torch.equal(moved.run(), scores)


def test_what_is_kept_of_compiled_products_is_told(monkeypatch):
    monkeypatch.setattr(machine, "keep_few_products", lambda: "7")
    choices = {choice.what: choice.chosen for choice in machine.set_up(Runtime(torch.device("cpu")))}
    assert choices["code of oneDNN's products"] == "kept for 7 shapes"
