"""Timings as a picture: lines where sizes grow, bars of ratios elsewhere. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attnbench.bench.results import Section, extremes, relative
from attnbench.core.files import write_atomic

_WIDTH = 9.0
"""Of the picture, in inches."""
_STYLES = (("-", "o"), ("--", "s"), (":", "^"))
"""Dashes and markers of ten lines each, since colours come again."""
_COSTS = [mantissa * 10.0**power for power in range(-4, 6) for mantissa in (1, 1.2, 1.5, 2, 3, 5, 7)]
_DECADES = [10.0**power for power in range(-9, 9)]
_TICKS = [mantissa * decade for decade in _DECADES for mantissa in (1, 2, 5)]
_MOST = 10
"""Ticks that an axis has room for."""
_FASTER, _SLOWER = "#4c78a8", "#e39a4c"
"""Than what they are compared with: two colours that the colour-blind tell apart."""


def draw(sections: Sequence[Section], path: Path) -> bool:
    """Write the picture, an SVG; False where matplotlib is not installed, and nothing is written."""
    try:
        mpl: Any = importlib.import_module("matplotlib")
    except ImportError:
        return False
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "attnbench", "svg.fonttype": "none"})
    plt: Any = importlib.import_module("matplotlib.pyplot")
    heights = [4.0 if section.exponents else 0.8 + 0.16 * len(_rows(section)) for section in sections]
    figure, axes = plt.subplots(
        len(sections), 1, figsize=(_WIDTH, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for section, (axis,) in zip(sections, axes, strict=True):
        (_lines if section.exponents else _bars)(section, axis)
        axis.set_title(section.title, loc="left", fontsize="medium")
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    plt.close(figure)
    write_atomic(path, picture.getvalue())
    return True


def _lines(section: Section, axis: Any) -> None:
    """Milliseconds against the size, which the group is called by: `length 512`."""
    series: dict[str, list[tuple[float, float]]] = {}
    for each in section.timings:
        series.setdefault(each.name, []).append((float(each.group.rsplit(" ", 1)[1]), 1e3 * each.median))
    for number, (name, points) in enumerate(series.items()):
        slope = (section.exponents or {}).get(name)
        label = name if slope is None else f"{name}: {slope.slope:.2f}"
        dashes, marker = _STYLES[number // 10 % len(_STYLES)]
        axis.loglog(*zip(*points, strict=True), dashes, marker=marker, markersize=4, label=label)
    sizes = sorted({size for points in series.values() for size, _ in points})
    axis.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    low, high = (pick(cost for points in series.values() for _, cost in points) for pick in (min, max))
    ticks = [tick for tick in _COSTS if 0.8 * low <= tick <= 1.25 * high]
    if high < 100 * low and len(ticks) > 1:  # matplotlib alone would mark powers of ten, of which there is one at most
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlabel(section.timings[0].group.rsplit(" ", 1)[0], fontsize="small")
    axis.set_ylabel("milliseconds")
    axis.grid(alpha=0.3)
    axis.legend(
        fontsize="x-small", title="exponent of the time", title_fontsize="x-small", handlelength=4,
        loc="upper left", bbox_to_anchor=(1, 1),
    )  # fmt: skip


class _Row(NamedTuple):
    """A bar, or the heading of a group's: one without a ratio."""

    label: str
    ratio: float | None = None
    least: float = 1.0
    most: float = 1.0


def _rows(section: Section) -> list[_Row]:
    """From the top. A group in which nothing is the measure of the others has no bars."""
    groups: dict[str, list[_Row]] = {}
    for each in section.timings:
        ratio = relative(section, each)
        if ratio is not None:
            groups.setdefault(each.group, []).append(_Row(each.name, ratio, *extremes(section, each)))
    return [row for group, rows in groups.items() for row in (_Row(group), *rows)]


def _bars(section: Section, axis: Any) -> None:
    """Speed as a multiple of the fastest baseline's, a bar a name under the heading of every group: to the right what
    is faster. A line goes from the least to the most of a round, a number says the median."""
    rows = _rows(section)
    axis.set_xscale("log")
    axis.axvline(1.0, color="black", linewidth=0.8)
    for place, row in enumerate(rows):
        if row.ratio is None:
            continue
        faster = row.ratio >= 1
        axis.barh(place, row.ratio - 1, left=1.0, height=0.7, color=_FASTER if faster else _SLOWER)
        axis.plot(row.ratio, place, ".", color="black", markersize=3)  # a bar to 1 has no length
        axis.hlines(place, row.least, row.most, color="black", linewidth=0.8)
        axis.annotate(
            f"{row.ratio:.3g}" if row.ratio < 0.1 else f"{row.ratio:.2f}",
            (max(row.ratio, row.most) if faster else min(row.ratio, row.least), place),
            xytext=(4 if faster else -4, 0), textcoords="offset points", va="center",
            ha="left" if faster else "right", fontsize="xx-small",
        )  # fmt: skip
    ratios = [1.0, *(end for row in rows if row.ratio is not None for end in (row.ratio, row.least, row.most))]
    least, most = min(ratios), max(ratios)
    some, few = ([tick for tick in ticks if 0.4 * least <= tick <= 2.5 * most] for ticks in (_TICKS, _DECADES))
    ticks = some if len(some) <= _MOST else few
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlim(min([*ticks, 0.8 * least]), max([*ticks, 1.25 * most]))
    axis.minorticks_off()
    axis.set_yticks(range(len(rows)), [row.label for row in rows], fontsize="xx-small")
    for label, row in zip(axis.get_yticklabels(), rows, strict=True):
        if row.ratio is None:
            label.set_fontweight("bold")
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    base = " and ".join(section.baseline)
    axis.set_xlabel(f"speed against {'the faster of ' if len(section.baseline) > 1 else ''}{base}", fontsize="small")
