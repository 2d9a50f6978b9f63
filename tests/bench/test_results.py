"""Ratios, tables and comparisons of timings that are written down here."""

from __future__ import annotations

import json

import pytest

from attnbench.bench.machine import Roofline
from attnbench.bench.results import Section, as_json, best, falls, markdown, relative, share, tables
from attnbench.bench.timer import Timing

MACHINE = Roofline({"fp32": 1e9}, 1e9)


def timing(name, median, group="g", low=None, work=1.0, flops=None):
    return Timing(group, name, median, median if low is None else low, median, 1.0, work, flops, None)


def section(*timings, unit="", peak=None):
    return Section("some", ("base", "other"), list(timings), unit, peak_flops=peak)


def document(found):
    return as_json([found], {}, [], MACHINE, {}, "attnbench speed")


def test_speed_is_against_the_fastest_baseline_of_the_group():
    found = section(
        timing("base", 2.0),
        timing("other", 4.0),
        timing("a", 1.0),
        timing("a", 1.0, group="h"),
        timing("base", 5.0, "h"),
    )
    assert relative(found, found.timings[2]) == 2.0
    assert relative(found, found.timings[1]) == 0.5
    assert relative(found, found.timings[3]) == 5.0
    assert relative(section(timing("a", 1.0)), timing("a", 1.0)) is None


def rounds(name, *seconds, work=1.0):
    low, median, high = min(seconds), sorted(seconds)[len(seconds) // 2], max(seconds)
    return Timing("g", name, median, low, high, 1.0, work, None, None, rounds=seconds)


def test_a_machine_that_slows_down_slows_both():
    """Medians of times would be 4 and 3."""
    found = section(rounds("base", 2.0, 4.0, 8.0), rounds("a", 1.0, 3.0, 4.0))
    assert relative(found, found.timings[1]) == 2.0
    assert relative(found, found.timings[0]) == 1.0
    (table,) = tables([found])
    assert table.lines == [["base", "4 s x 1.00 ±75%"], ["a", "3 s x 0.50 ±25%"]]


def test_rates_are_against_the_work_of_the_baseline():
    found = section(rounds("base", 2.0, 4.0, 8.0, work=10), rounds("a", 1.0, 3.0, 4.0, work=20), unit="tokens")
    assert relative(found, found.timings[1]) == 4.0
    (table,) = tables([found])
    assert table.lines[1] == ["a", "7/s x 4.00 ±17%"]


def test_the_least_times_have_a_ratio_of_their_own():
    found = section(timing("base", 2.0, low=1.0), timing("a", 4.0, low=0.5))
    assert relative(found, found.timings[1]) == 0.5
    assert best(found, found.timings[1]) == 2.0


def test_the_share_of_what_the_machine_can_do():
    found = section(timing("a", 2.0, flops=1e9), timing("b", 2.0), peak=1e9)
    assert share(found, found.timings[0]) == 0.5
    assert share(found, found.timings[1]) is None


def test_tables_show_calls_as_times_and_rates_as_speeds():
    calls = section(timing("base", 0.001), timing("a", 0.002, low=0.001))
    (table,) = tables([calls])
    assert table.head == ["", "g"]
    assert table.lines == [["base", "1 ms x 1.00"], ["a", "2 ms x 2.00 ±25%"]]
    rates = section(timing("base", 1.0, work=4000), timing("a", 2.0, work=4000, flops=1e9), unit="tokens", peak=1e9)
    (table,) = tables([rates])
    assert table.lines == [["base", "4,000/s x 1.00"], ["a", "2,000/s x 0.50, 50% of peak"]]


def test_a_name_that_a_group_has_not_leaves_its_place_empty():
    (table,) = tables([section(timing("base", 1e-5), timing("a", 1e-5, group="h"))])
    assert table.lines == [["base", "10 us x 1.00", ""], ["a", "", "10 us"]]


def test_memory_has_a_table_of_its_own():
    held = timing("base", 1.0)._replace(peak_mb=1234.5)
    _, table = tables([section(held, timing("a", 1.0))])
    assert table.title == "some: most memory, MiB"
    assert table.lines == [["base", "1,234"], ["a", ""]]


def test_a_table_says_how_it_is_read():
    (table,) = tables([Section("some", ("base",), [timing("base", 1.0)], "tokens")])
    assert table.note.startswith("Work a second; x: in multiples of that of base. Multiples are medians of")


def test_markdown_holds_every_line():
    text = markdown(list(tables([section(timing("base", 1.0))])), ["signature"], "attnbench speed ops")
    assert text.splitlines() == [
        "`attnbench speed ops`", "", "- signature", "", "## some", "",
        "Time of a call; x: in multiples of that of the faster of base and other. Multiples are medians of those of "
        "single rounds. ±: half of what lies between the least and the most of them, in parts of the median; where the "
        "multiple is that of a thing to itself, of its times.", "", "|  | g |", "| --- | --- |",
        "| base | 1 s x 1.00 |",
    ]  # fmt: skip


def test_what_fell_is_told_worst_first():
    before = document(
        section(timing("base", 1.0), timing("a", 1.0), timing("b", 1.0), timing("c", 1.0), timing("gone", 1.0))
    )
    now = document(
        section(timing("base", 1.0), timing("a", 1.05), timing("b", 1.5), timing("c", 2.0), timing("new", 9.0))
    )
    fallen, compared = falls(before, json.loads(json.dumps(now)), 0.1)
    assert [(fall.name, fall.before, pytest.approx(fall.now)) for fall in fallen] == [
        ("c", 1.0, 0.5),
        ("b", 1.0, 2 / 3),
    ]
    assert compared == 4
    assert "now at 0.50" in str(fallen[0])


def test_a_slower_baseline_falls_too_and_so_does_the_share_of_the_peak():
    before = document(section(timing("base", 1.0), timing("other", 1.0, flops=1e9), peak=1e9))
    now = document(section(timing("base", 1.0), timing("other", 3.0, flops=1e9), peak=1e9))
    fallen, compared = falls(before, now, 0.1)
    assert [fall.name for fall in fallen] == ["other", "other, share of peak"]
    assert compared == 3
