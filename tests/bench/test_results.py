"""Ratios, tables and comparisons of timings that are written down here."""

from __future__ import annotations

import json

import pytest

from attnbench.bench.machine import Roofline
from attnbench.bench.results import Exponent, Section, as_json, best, compare, markdown, relative, tables
from attnbench.bench.timer import Timing

MACHINE = Roofline({"fp32": 1e9}, 1e9)


def timing(name, median, group="g", low=None, work=1.0, share=None):
    return Timing(group, name, median, median if low is None else low, median, 1.0, work, None, share, share)


def section(*timings, unit="", baseline=("base", "other")):
    return Section("some", baseline, list(timings), unit)


def document(found, peers=()):
    return json.loads(json.dumps(as_json([found], {}, [], MACHINE, dict.fromkeys(peers, "1.0"), "attnbench speed")))


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
    return Timing("g", name, median, low, high, 1.0, work, None, rounds=seconds)


def test_a_machine_that_slows_down_slows_both():
    """Medians of times would be 4 and 3."""
    found = section(rounds("base", 2.0, 4.0, 8.0), rounds("a", 1.0, 3.0, 4.0))
    assert relative(found, found.timings[1]) == 2.0
    assert relative(found, found.timings[0]) == 1.0
    (table,) = tables([found])
    assert table.lines == [["base", "4 s x 1.00 ±75%"], ["a", "3 s x 0.50 ±25%"]]


def test_multiples_of_two_rounds_are_the_inverse_of_those_of_speeds():
    found = section(rounds("base", 1.0, 1.0), rounds("a", 1.0, 4.0))
    assert relative(found, found.timings[1]) == pytest.approx(0.5)
    (table,) = tables([found])
    assert table.lines[1] == ["a", "4 s x 2.00 ±75%"]


def test_rates_are_against_the_work_of_the_baseline():
    found = section(rounds("base", 2.0, 4.0, 8.0, work=10), rounds("a", 1.0, 3.0, 4.0, work=20), unit="tokens")
    assert relative(found, found.timings[1]) == 4.0
    (table,) = tables([found])
    assert table.lines[1] == ["a", "7/s x 4.00 ±17%"]


def test_the_least_times_have_a_ratio_of_their_own():
    found = section(timing("base", 2.0, low=1.0), timing("a", 4.0, low=0.5))
    assert relative(found, found.timings[1]) == 0.5
    assert best(found, found.timings[1]) == 2.0


def test_tables_show_calls_as_times_and_rates_as_speeds():
    calls = section(timing("base", 0.001), timing("a", 0.002, low=0.001))
    (table,) = tables([calls])
    assert table.head == ["", "g"]
    assert table.lines == [["base", "1 ms x 1.00"], ["a", "2 ms x 2.00 ±25%"]]
    rates = section(timing("base", 1.0, work=4000), timing("a", 2.0, work=4000, share=0.5), unit="tokens")
    (table,) = tables([rates])
    assert table.lines == [["base", "4,000/s x 1.00"], ["a", "2,000/s x 0.50, 50%"]]
    assert "%: of the rate at which the machine does matrix products in the same rounds." in table.note


@pytest.mark.parametrize(("seconds", "text"), [
    (1234.5, "1,234 s"), (100, "100 s"), (1.2345, "1.23 s"), (0.9996, "1 s"), (0.0999, "99.9 ms"), (0.02, "20 ms"),
    (1e-5, "10 us"), (3e-7, "300 ns"), (0, "0 ns"),
])  # fmt: skip
def test_times_have_three_digits(seconds, text):
    (table,) = tables([section(timing("a", 1.0)._replace(median=seconds))])
    assert table.lines == [["a", text]]


def test_exponents_of_other_sizes_say_so():
    found = section(timing("base", 1.0), timing("a", 1.0))
    slopes = {"base": Exponent(1.5, 512, 65536), "a": Exponent(1.94, 512, 8192)}
    (table,) = tables([found._replace(exponents=slopes)])
    assert [line[-1] for line in table.lines] == ["1.50", "1.94 (512 to 8,192)"]
    slopes = {"base": Exponent(1.5, 512, 65536, 0.042, 1.987), "a": Exponent(1.94, 512, 8192, 0.1)}
    (table,) = tables([found._replace(exponents=slopes)])
    assert [line[-1] for line in table.lines] == ["1.50 ±0.04, last 1.99", "1.94 ±0.10 (512 to 8,192)"]
    assert "Exponent: the slope of log time over log size, the median of those of single rounds, ± half" in table.note


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
    (table,) = tables([section(timing("alone", 1.0), baseline=())])
    assert table.note.startswith("Time of a call. ±: half of what lies between the least and the most of the rounds")
    assert "x:" not in table.note


def test_markdown_holds_every_line():
    text = markdown(list(tables([section(timing("base", 1.0))])), ["signature"], "attnbench speed ops")
    assert text.splitlines() == [
        "`attnbench speed ops`", "", "- signature", "", "## some", "",
        "Time of a call; x: in multiples of that of the faster of base and other. Multiples are medians of those of "
        "single rounds. ±: half of what lies between the least and the most of them, in parts of the median; where the "
        "multiple is that of a thing to itself, of its times. First calls, not counted: 1 s in all.", "", "|  | g |",
        "| --- | --- |",
        "| base | 1 s x 1.00 |",
    ]  # fmt: skip


def test_what_fell_is_told_worst_first():
    before = document(section(timing("base", 1.0), timing("a", 1.0), timing("b", 1.0), timing("c", 1.0)))
    now = document(
        section(timing("base", 1.0), timing("a", 1.05), timing("b", 1.5), timing("c", 2.0), timing("new", 9.0))
    )
    found = compare(before, now, 0.1)
    assert [(fall.name, fall.before, pytest.approx(fall.now)) for fall in found.fallen] == [
        ("c", 1.0, 0.5),
        ("b", 1.0, 2 / 3),
    ]
    assert (found.gone, found.compared, found.worse) == ([], 4, True)
    assert "is at 0.50 of what it was beside what it is compared with (1, now 0.5 times as fast)" in str(
        found.fallen[0]
    )
    assert not compare(before, before, 0.1).worse


def test_what_slows_everything_down_is_seen_against_the_machine():
    before = document(section(timing("base", 1.0, share=0.5), timing("other", 1.0), timing("a", 1.0, share=0.5)))
    now = document(section(timing("base", 2.0, share=0.25), timing("other", 2.0), timing("a", 2.0, share=0.25)))
    found = compare(before, now, 0.1)
    assert [str(fall) for fall in found.fallen] == [
        "some: base, against matrix products (g) is at 0.50 of what it was beside what it is compared with, by the "
        "least times"
    ]
    assert found.compared == 4


@pytest.mark.parametrize(("then", "now"), [(0.0, 12.0), (12.0, None)])
def test_what_other_programs_may_have_done_is_said(then, now):
    quiet = document(section(timing("base", 1.0), timing("a", 1.0)))
    assert not compare(quiet, quiet, 0.1).notes
    (said,) = compare({**quiet, "shared_seconds": then}, {**quiet, "shared_seconds": now}, 0.1).notes
    assert said.startswith("other programs used the same processor cores for 12 s of one of the two: what fell may be")


def test_a_page_says_what_as_shipped_is():
    (table,) = tables([section(timing("x, as shipped", 1.0), timing("x", 1.0))._replace(baseline=("x, as shipped",))])
    assert "As shipped: with torch's own choice of matrix library and memory" in table.note
    (table,) = tables([section(timing("base", 1.0))])
    assert "shipped" not in table.note


def test_beside_other_packages_than_before_nothing_is_compared():
    """The fastest of them may be another one."""
    torch, marian = "torch.nn.Transformer, float32, as shipped", "transformers' Marian, float32, as shipped"
    both = section(timing(torch, 1.0), timing(marian, 0.5), timing("ours", 0.4), baseline=(torch, marian))
    alone = section(timing(torch, 1.0), timing("ours", 0.4), baseline=(torch,))
    assert relative(both, both.timings[2]) == 0.5 / 0.4
    before, now = document(both, ["torch", "transformers"]), document(alone, ["torch"])
    found = compare(before, now, 0.1)
    assert (found.gone, found.fallen, found.compared) == ([], [], 0)
    assert "some: beside other packages than it was, and not compared" in found.notes
    assert not compare(now, now, 0.1).notes


def test_what_a_faster_baseline_leaves_behind_has_not_become_slower():
    before = document(section(timing("base", 1.0, share=0.5), timing("a", 1.0, share=0.5)))
    now = document(section(timing("base", 0.5, share=1.0), timing("a", 1.0, share=0.49)))
    found = compare(before, now, 0.1)
    assert ([each.name for each in found.outrun], found.fallen, found.worse) == (["a"], [], False)
    noise = document(section(timing("base", 1.0, share=0.55), timing("a", 1.15, share=0.48)))  # the yardstick's
    assert [each.name for each in compare(before, noise, 0.1).fallen] == ["a"]
    slower = document(section(timing("base", 0.9, share=0.5), timing("a", 1.0, share=0.45)))
    found = compare(before, slower, 0.05)
    assert ([each.name for each in found.fallen], found.outrun) == (["a"], ())


def test_the_pace_of_torch_is_no_business_of_ours():
    def found(share):
        return document(section(timing("SDPA", 1.0, share=share), timing("a", 1.0), baseline=("SDPA", "softmax")))

    assert not compare(found(0.5), found(0.1), 0.1).worse


def test_other_rounds_are_told():
    before, now = document(section(timing("base", 1.0))), document(section(timing("base", 1.0)))
    before.update(rounds=5, quick=False)
    now.update(rounds=1, quick=False)
    assert compare(before, now, 0.1).notes == ("rounds was 5, now 1: least times of other cases or rounds",)


def test_where_there_is_no_baseline_each_is_compared_with_the_machine():
    before = document(section(timing("a", 1.0, share=0.5), timing("b", 1.0), baseline=()))
    found = compare(before, document(section(timing("a", 9.0, share=0.1), timing("b", 9.0), baseline=())), 0.1)
    assert ([fall.name for fall in found.fallen], found.compared) == (["a, against matrix products"], 1)


def test_a_case_that_is_gone_is_told_where_its_group_is_there():
    before = document(
        section(timing("base", 1.0), timing("a", 1.0), timing("entmax: a", 1.0), timing("base", 1.0, "h")), ["entmax"]
    )
    found = compare(before, document(section(timing("base", 1.0))), 0.1)
    assert (found.gone, found.other, found.worse) == ([("some", "g", "a")], 1, True)
    with_peer = compare(before, document(section(timing("base", 1.0), timing("a", 1.0)), ["entmax"]), 0.1)
    assert with_peer.gone == [("some", "g", "entmax: a")]


def test_a_fall_is_a_part_of_what_was():
    before = document(section(timing("base", 1.0), timing("slow", 10.0)))
    assert [
        fall.name for fall in compare(before, document(section(timing("base", 1.0), timing("slow", 12.5))), 0.1).fallen
    ] == ["slow"]
    assert not compare(before, document(section(timing("base", 1.0), timing("slow", 10.5))), 0.1).worse


def test_other_packages_do_not_fall():
    before = document(section(timing("base", 1.0), timing("entmax: a", 10.0)), ["entmax"])
    found = compare(before, document(section(timing("base", 1.0), timing("entmax: a", 20.0)), ["entmax"]), 0.1)
    assert (found.fallen, found.compared, found.worse) == ([], 1, False)


def test_a_case_that_a_new_version_lacks_is_not_gone():
    before = document(section(timing("base", 1.0), timing("entmax: a", 10.0)), ["entmax"])
    now = document(section(timing("base", 1.0)), ["entmax"])
    assert compare(before, now, 0.1).worse
    now["peers"]["entmax"] = "2"
    found = compare(before, now, 0.1)
    assert (found.gone, found.notes, found.worse) == ([], (), False)  # what is compared here depends on no package


def test_nothing_is_compared_beside_another_version():
    """A peer that became faster makes nothing here slower."""
    name = "CTranslate2, float32"
    before = document(section(timing(name, 1.0), timing("softmax", 1.0), baseline=(name,)), ["ctranslate2"])
    now = document(section(timing(name, 0.5), timing("softmax", 1.0), baseline=(name,)), ["ctranslate2"])
    assert [fall.name for fall in compare(before, now, 0.1).fallen] == ["softmax"]
    now["peers"]["ctranslate2"] = "5"
    found = compare(before, now, 0.1)
    assert (found.fallen, found.compared, found.worse) == ([], 0, True)
    assert found.notes == (
        f"ctranslate2 was {before['peers']['ctranslate2']}, now 5: what is timed beside it is not compared",
    )


def test_nothing_in_common_is_no_success():
    before = document(section(timing("base", 1.0, "h")))
    found = compare(before, document(section(timing("base", 1.0))), 0.1)
    assert (found.compared, found.other, found.worse) == (0, 1, True)


def test_files_of_before_there_were_shares_can_be_compared_with():
    before = document(section(timing("base", 1.0, share=0.5)))
    for each in before["sections"][0]["timings"]:
        del each["pace"]
    found = compare(before, document(section(timing("base", 3.0, share=0.1))), 0.1)
    assert (found.compared, found.worse) == (1, False)
