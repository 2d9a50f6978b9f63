"""Pictures hold every name and group, lines where sizes grow."""

from __future__ import annotations

import pytest

from attnbench.bench.plot import draw
from attnbench.bench.results import Exponent, Section
from attnbench.bench.timer import Timing

pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")


def timing(name, group, median):
    return Timing(group, name, median, median, median, 1.0, 1.0, None)


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
    for word in ("g   base", "g   other", "grows: 1.00", "length", "milliseconds", "speed against base"):
        assert f">{word}</text>" in text
    assert "lonely" not in text  # no baseline in its group: no ratio
    first = (tmp_path / "speed.svg").read_bytes()
    draw([bars, lines], tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").read_bytes() == first


@pytest.mark.parametrize("times", [2300.0, 1e-4, 3.0])
def test_a_bar_lies_within_its_picture(times, tmp_path, monkeypatch):
    limits = []
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: limits.extend(axis.get_xlim() for axis in figure.axes))
    draw([Section("speeds", ("base",), [timing("base", "g", 1.0), timing("other", "g", times)])], tmp_path / "a.svg")
    ((left, right),) = limits
    assert left < 1 / times < right
    assert left < 1 < right
