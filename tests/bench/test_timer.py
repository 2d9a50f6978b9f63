"""Cases have their turns, what is timed is what was asked for, and nothing wrong is timed."""

from __future__ import annotations

import time

import pytest
import torch

from attnbench.bench.timer import Case, Yardstick, measure
from attnbench.core.errors import AttnbenchError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("names", "rounds"), [("abc", 3), ("abcdefghijklmnopqrst", 5)])
def test_every_case_has_its_turn_in_every_round_and_none_always_the_same_one_before_it(names, rounds):
    seen = []
    cases = [Case("g", name, lambda name=name: seen.append(name) or time.sleep(0.002)) for name in names]
    timings = measure(cases, rounds=rounds, chunk=0.001, device=CPU)
    assert [each.name for each in timings] == [*names]
    first, gauged, *turns = (seen[at : at + len(names)] for at in range(0, len(seen), len(names)))
    assert first == gauged == [*names]
    assert [sorted(turn) for turn in turns] == [sorted(names)] * rounds
    follows = list(zip(seen[2 * len(names) - 1 :], seen[2 * len(names) :], strict=False))
    for name in names:
        assert len({before for before, each in follows if each == name}) > 1


def test_medians_and_spread(monkeypatch):
    times = iter([9.0, 1.0, 3.0, 2.0, 7.0])
    monkeypatch.setattr("attnbench.bench.timer.seconds", lambda run, calls, device: next(times))
    (timing,) = measure([Case("g", "a", lambda: None, work=10)], rounds=3, chunk=0.1, device=CPU)
    assert (timing.first, timing.low, timing.median, timing.high) == (9.0, 2.0, 3.0, 7.0)
    assert timing.rate == pytest.approx(10 / 3)
    assert timing.rounds == (3.0, 2.0, 7.0)


def test_short_cases_are_called_often_and_long_ones_once():
    calls = {"short": 0, "long": 0}

    def short():
        calls["short"] += 1

    def long():
        calls["long"] += 1
        time.sleep(0.02)

    measure([Case("g", "s", short), Case("g", "l", long)], rounds=2, chunk=0.002, device=CPU)
    assert calls["long"] == 4
    assert calls["short"] > 20


@pytest.mark.parametrize(("coarse", "loose"), [(True, False), (False, True), (False, False)])
def test_fewer_bits_may_differ_by_ten_times_as_much(coarse, loose):
    def measured(error):
        case = Case("g", "rounded", int, check=lambda: error, coarse=coarse)
        return measure([case], rounds=1, chunk=0.001, device=CPU, loose=loose)

    if coarse or loose:
        measured(9e-3)
    with pytest.raises(AttnbenchError, match="rounded"):
        measured(1.1e-2 if coarse or loose else 1.1e-3)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_what_differs_from_its_definition_is_not_timed(error):
    timed = []
    cases = [
        Case("g", "right", lambda: timed.append(1), check=lambda: 0.0),
        Case("g", "wrong", int, check=lambda: error),
    ]
    with pytest.raises(AttnbenchError, match="wrong"):
        measure(cases, rounds=1, chunk=0.01, device=CPU)
    assert len(timed) == 1  # its first call


def test_the_first_call_is_told_apart_from_those_that_follow_its_check():
    order = []
    case = Case("g", "a", lambda: order.append("run"), check=lambda: order.append("check") or 0.0)
    (timing,) = measure([case], rounds=1, chunk=0, device=CPU)
    assert order[:2] == ["run", "check"]
    assert timing.first > 0


def test_shares_are_of_what_the_machine_did_in_the_same_rounds(monkeypatch):
    times = iter([9.0, 1.0, 1.0, 4.0, 2.0, 4.0, 8.0, 16.0, 4.0])
    monkeypatch.setattr("attnbench.bench.timer.seconds", lambda run, calls, device: next(times))
    cases = [Case("g", "a", int, 5.0, cost=lambda: 30.0)]
    (timing,) = measure(cases, rounds=3, chunk=0, device=CPU, yardstick=Yardstick(int, 20.0))
    # rounds: the case 4, 8, 16 s and the machine 2, 4, 4 s for 20 of what the case needs 30
    assert timing.rounds == (4.0, 8.0, 16.0)
    assert timing.share == pytest.approx(0.75)
    assert timing.pace == pytest.approx(5 * 2 / 20 / 4)


def test_without_a_yardstick_nothing_is_counted():
    (timing,) = measure([Case("g", "a", int, cost=lambda: pytest.fail("counted"))], rounds=1, chunk=0, device=CPU)
    assert (timing.share, timing.pace) == (None, None)


@pytest.mark.parametrize("settle", [0, 3])
def test_calls_that_settle_a_case_are_not_timed(settle, monkeypatch):
    calls, timed = [], []

    def seconds(run, count, device):
        timed.append(len(calls))
        run()
        return 1.0

    def check():
        assert len(calls) == 1 + settle
        return 0.0

    monkeypatch.setattr("attnbench.bench.timer.seconds", seconds)
    measure([Case("g", "a", lambda: calls.append(0), check=check, settle=settle)], rounds=2, chunk=0, device=CPU)
    assert timed == [0, 1 + settle, 2 + settle, 3 + settle]
