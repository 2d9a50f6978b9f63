"""Timings as sections of a report: ratios, shares of what the machine can do, tables, and what fell since a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from attnbench.bench.machine import Choice, Roofline
from attnbench.bench.timer import Timing

SCHEMA = 1


class Section(NamedTuple):
    """Timings that one table shows: a line a name, a column a group.

    baseline: the names whose fastest is 1 in every group. unit: of the work, "" where calls are counted.
    exponents: of each name, where the groups are sizes.
    """

    title: str
    baseline: tuple[str, ...]
    timings: list[Timing]
    unit: str = ""
    exponents: dict[str, float] | None = None
    peak_flops: float | None = None


def relative(section: Section, timing: Timing) -> float | None:
    """Speed against the fastest baseline of the group, the median of the rounds: 2 is twice as fast. None where the
    group has no baseline."""
    found = _ratios(section, timing)
    return statistics.median(found) if found else None


def _ratios(section: Section, timing: Timing) -> list[float]:
    """The same of each round: what slows a machine for minutes meets both."""
    base = max(
        (each for each in section.timings if _is_baseline(section, each, timing.group)),
        key=lambda each: each.rate,
        default=None,
    )
    if base is None:
        return []
    if not timing.rounds or len(timing.rounds) != len(base.rounds):
        return [timing.rate / base.rate]
    sizes = timing.work / base.work
    return [sizes * theirs / own for own, theirs in zip(timing.rounds, base.rounds, strict=True)]


def best(section: Section, timing: Timing) -> float | None:
    """The same of the least times, which other work on the machine moves least."""
    rates = [each.work / each.low for each in section.timings if _is_baseline(section, each, timing.group)]
    return timing.work / timing.low / max(rates) if rates else None


def _is_baseline(section: Section, each: Timing, group: str) -> bool:
    return each.group == group and each.name in section.baseline


def share(section: Section, timing: Timing) -> float | None:
    """The part of the measured rate of matrix products that a case reaches with its own."""
    if timing.flops is None or section.peak_flops is None:
        return None
    return timing.flops / timing.median / section.peak_flops


def as_json(
    sections: Sequence[Section],
    signature: dict[str, Any],
    choices: Sequence[Choice],
    machine: Roofline,
    peers: dict[str, str],
    command: str,
    finished: bool = True,
) -> dict[str, Any]:
    """finished: whether these are all that the command measures."""
    return {
        "schema_version": SCHEMA,
        "command": command,
        "finished": finished,
        "signature": signature,
        "machine": {"flops": machine.flops, "bandwidth": machine.bandwidth},
        "peers": peers,
        "choices": [choice._asdict() for choice in choices],
        "sections": [
            {
                "title": section.title,
                "baseline": list(section.baseline),
                "unit": section.unit,
                "exponents": section.exponents,
                "timings": [
                    {
                        **each._asdict(),
                        "relative": relative(section, each),
                        "best": best(section, each),
                        "share": share(section, each),
                    }
                    for each in section.timings
                ],
            }
            for section in sections
        ],
    }


class Table(NamedTuple):
    """note: how its entries are read."""

    title: str
    note: str
    head: list[str]
    lines: list[list[str]]


def tables(sections: Sequence[Section]) -> Iterator[Table]:
    for section in sections:
        groups = list(dict.fromkeys(each.group for each in section.timings))
        found = {(each.name, each.group): each for each in section.timings}
        head = ["", *groups, *(["exponent"] if section.exponents else [])]
        lines = []
        for name in dict.fromkeys(each.name for each in section.timings):
            line = [name]
            for group in groups:
                each = found.get((name, group))
                line.append("" if each is None else _entry(section, each))
            if section.exponents:
                line.append(f"{section.exponents[name]:.2f}" if name in section.exponents else "")
            lines.append(line)
        yield Table(section.title, _note(section), head, lines)
        if any(each.peak_mb is not None for each in section.timings):
            yield _peaks(section, groups)


def _peaks(section: Section, groups: list[str]) -> Table:
    peaks = {(each.name, each.group): each.peak_mb for each in section.timings}
    lines = []
    for name in dict.fromkeys(each.name for each in section.timings):
        held = [peaks.get((name, group)) for group in groups]
        lines.append([name, *("" if peak is None else f"{peak:,.0f}" for peak in held)])
    return Table(f"{section.title}: most memory, MiB", "Each in a process of its own.", ["", *groups], lines)


def _note(section: Section) -> str:
    base = section.baseline[0] if len(section.baseline) == 1 else f"the faster of {' and '.join(section.baseline)}"
    if section.unit:
        ratio = f"Work a second; x: in multiples of that of {base}."
    else:
        ratio = f"Time of a call; x: in multiples of that of {base}."
    return (
        f"{ratio} Multiples are medians of those of single rounds. ±: half of what lies between the least and the most "
        "of them, in parts of the median; where the multiple is that of a thing to itself, of its times."
    )


def _entry(section: Section, timing: Timing) -> str:
    """`131 us x 1.20 ±3%` of a call, with how much longer it takes; `3,200/s x 0.95 ±3%` of a rate, with its part."""
    ratio, part = relative(section, timing), share(section, timing)
    if section.unit:
        text = f"{timing.rate:,.0f}/s"
        text += "" if ratio is None else f" x {ratio:.2f}"
        text += "" if part is None else f", {100 * part:.0f}% of peak"
    else:
        text = _duration(timing.median)
        text += "" if ratio is None else f" x {1 / ratio:.2f}"
    return f"{text} ±{100 * _spread(section, timing):.0f}%" if timing.low < timing.high else text  # one round has none


def _spread(section: Section, timing: Timing) -> float:
    """Half of what lies between the least and the most of a figure's rounds, in parts of the median."""
    found = _ratios(section, timing) if section.unit else [1 / ratio for ratio in _ratios(section, timing)]
    least, most = (min(found), max(found)) if found else (1.0, 1.0)
    if least == most:  # against itself, or nothing
        return (timing.high - timing.low) / (2 * timing.median)
    return (most - least) / (2 * statistics.median(found))


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"


def head_lines(signature: dict[str, Any], choices: Sequence[Choice], machine: Roofline) -> list[str]:
    lines = [", ".join(f"{name} {value}" for name, value in signature.items() if value is not None)]
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in machine.flops.items())
    lines.append(f"measured: matrix products {rates}; copies {machine.bandwidth / 1e9:,.1f} GB/s")
    for choice in choices:
        gain = "" if choice.gain is None else f": {choice.gain:.2f} times as fast as without"
        lines.append(f"{choice.what}: {choice.chosen}{gain}")
    return lines


def markdown(found: Sequence[Table], head: Sequence[str], command: str) -> str:
    lines = [f"`{command}`", "", *(f"- {line}" for line in head)]
    for table in found:
        lines += [
            "",
            f"## {table.title}",
            "",
            table.note,
            "",
            f"| {' | '.join(table.head)} |",
            "|" + " --- |" * len(table.head),
        ]
        lines += [f"| {' | '.join(line)} |" for line in table.lines]
    return "\n".join(lines) + "\n"


class Fall(NamedTuple):
    """A ratio that is lower than it was."""

    section: str
    group: str
    name: str
    before: float
    now: float

    def __str__(self) -> str:
        speeds = f"was {self.before:.2f}, now at {self.now:.2f}"
        return f"{self.section}: {self.name} ({self.group}) {speeds}"


def falls(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> tuple[list[Fall], int]:
    """Ratios of least times that fell by more than `tolerance`, a part of what they were, worst first; and how many
    were compared."""
    old = dict(ratios(before))
    compared = [(key, old[key], ratio) for key, ratio in ratios(now) if key in old]
    fallen = [Fall(*key, was, ratio) for key, was, ratio in compared if ratio < was * (1 - tolerance)]
    return sorted(fallen, key=lambda fall: fall.now / fall.before), len(compared)


def ratios(document: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Of least times, and shares of the measured rate: (section, group, name) and the figure."""
    for section in document["sections"]:
        for each in section["timings"]:
            if each["best"] is not None:
                yield (section["title"], each["group"], each["name"]), each["best"]
            if each["share"] is not None:
                yield (section["title"], each["group"], f"{each['name']}, share of peak"), each["share"]
