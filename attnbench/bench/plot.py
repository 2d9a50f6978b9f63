"""Timings as a picture: lines where sizes grow, bars of ratios elsewhere. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnbench.bench.results import Section, relative
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


def draw(sections: Sequence[Section], path: Path) -> bool:
    """Write the picture, an SVG; False where matplotlib is not installed, and nothing is written."""
    try:
        mpl: Any = importlib.import_module("matplotlib")
    except ImportError:
        return False
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "attnbench", "svg.fonttype": "none"})
    plt: Any = importlib.import_module("matplotlib.pyplot")
    heights = [4.0 if section.exponents else 0.6 + 0.16 * len(section.timings) for section in sections]
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


def _bars(section: Section, axis: Any) -> None:
    """Speed as a multiple of the fastest baseline's, a bar a name in every group: to the right what is faster."""
    shown = [(f"{each.group}   {each.name}", relative(section, each)) for each in reversed(section.timings)]
    known = [(label, ratio) for label, ratio in shown if ratio is not None]
    ratios = [ratio for _, ratio in known]
    axis.set_xscale("log")
    labels = [label for label, _ in known]
    axis.barh(labels, [ratio - 1 for ratio in ratios], left=1.0, height=0.7)
    axis.plot(ratios, labels, ".", color="black", markersize=3)  # a bar to 1 has no length
    axis.axvline(1.0, color="black", linewidth=0.8)
    least, most = min([*ratios, 1]), max([*ratios, 1])
    some, few = ([tick for tick in ticks if 0.4 * least <= tick <= 2.5 * most] for ticks in (_TICKS, _DECADES))
    ticks = some if len(some) <= _MOST else few
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlim(min([*ticks, 0.9 * least]), max([*ticks, 1.1 * most]))
    axis.minorticks_off()
    axis.tick_params(axis="y", labelsize="xx-small")
    base = " and ".join(section.baseline)
    axis.set_xlabel(f"speed against {'the faster of ' if len(section.baseline) > 1 else ''}{base}", fontsize="small")
    axis.margins(y=0.01)
