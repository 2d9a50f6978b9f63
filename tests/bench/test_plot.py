"""Pictures hold every name and group, lines where sizes grow."""

from __future__ import annotations

import pytest

from attnbench.bench.plot import draw
from attnbench.bench.results import Exponent, Section
from attnbench.bench.timer import Timing

pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")


def timing(name, group, median, rounds=()):
    return Timing(group, name, median, median, median, 1.0, 1.0, None, rounds=rounds)


def test_bars_and_lines(tmp_path):
    bars = Section(
        "speeds", ("base",), [timing("base", "g", 1.0), timing("other", "g", 2.0), timing("lonely", "h", 1.0)]
    )
    lines = Section(
        "cost against length", ("base",), [timing("grows", f"length {n}", n * 1e-6) for n in (10, 100)],
        exponents={"grows": Exponent(1.0, 10, 100)},
    )  # fmt: skip
    assert draw([bars, lines], tmp_path / "speed.svg")
    text = (tmp_path / "speed.svg").read_text()
    assert ">speeds</text>" in text
    for word in ("g", "base", "other", "0.50", "grows: 1.00", "length", "milliseconds", "speed against base"):
        assert f">{word}</text>" in text
    assert "lonely" not in text  # no baseline in its group: no ratio
    first = (tmp_path / "speed.svg").read_bytes()
    draw([bars, lines], tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").read_bytes() == first


def test_a_bar_stands_under_the_heading_of_its_group_with_the_least_and_the_most_of_a_round(monkeypatch, tmp_path):
    drawn = []
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: drawn.extend(figure.axes))
    timings = [
        timing("base", "g", 1.0, (1.0, 1.0, 2.0)),
        timing("slow", "g", 2.0, (2.0, 4.0, 2.0)),
        timing("base", "h", 1.0, (1.0, 1.0, 2.0)),
        timing("fast", "h", 0.5, (0.5, 0.5, 1.0)),
    ]
    draw([Section("speeds", ("base",), timings)], tmp_path / "a.svg")
    (axis,) = drawn
    labels = axis.get_yticklabels()
    assert [label.get_text() for label in labels] == ["g", "base", "slow", "h", "base", "fast"]
    assert [label.get_text() for label in labels if label.get_fontweight() == "bold"] == ["g", "h"]
    assert [text.get_text() for text in axis.texts] == ["1.00", "0.50", "1.00", "2.00"]
    assert [text.xy[1] for text in axis.texts] == [1, 2, 4, 5]
    lines = {float(y): (low, high) for line in axis.collections for (low, y), (high, _) in line.get_segments()}
    assert lines == {1: (1, 1), 2: (0.25, 1), 4: (1, 1), 5: (2, 2)}
    assert axis.yaxis_inverted()  # the first group is on top


@pytest.mark.parametrize("times", [2300.0, 1e-4, 3.0])
def test_a_bar_lies_within_its_picture(times, tmp_path, monkeypatch):
    limits = []
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: limits.extend(axis.get_xlim() for axis in figure.axes))
    draw([Section("speeds", ("base",), [timing("base", "g", 1.0), timing("other", "g", times)])], tmp_path / "a.svg")
    ((left, right),) = limits
    assert left < 1 / times < right
    assert left < 1 < right
