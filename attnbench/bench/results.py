"""Timings as sections of a report: ratios, shares of what the machine can do, tables, and what fell since a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from attnbench.bench.machine import Choice, Roofline
from attnbench.bench.timer import Timing

SCHEMA = 1


class Exponent(NamedTuple):
    """The slope of log time over log size, from `least` to `most`: the median of single rounds'. spread: half of what
    lies between the least and the most of them; None of one round. last: between the two largest sizes, where there are
    more."""

    slope: float
    least: int
    most: int
    spread: float | None = None
    last: float | None = None


class Section(NamedTuple):
    """Timings that one table shows: a line a name, a column a group.

    baseline: the names whose fastest is 1 in every group; none where no two cases do the same. unit: of the work, ""
    where calls are counted. limit: what the shares of timings are of. exponents: of each name, where the groups are
    sizes. in_float32: whatever precision was asked for.
    """

    title: str
    baseline: tuple[str, ...]
    timings: list[Timing]
    unit: str = ""
    limit: str = "matrix products"
    exponents: dict[str, Exponent] | None = None
    in_float32: bool = False


def relative(section: Section, timing: Timing) -> float | None:
    """Speed against the fastest baseline of the group, the median of the rounds: 2 is twice as fast. None where the
    group has no baseline."""
    found = _ratios(section, timing)
    return _median(found) if found else None


def _median(ratios: Sequence[float]) -> float:
    """Between the two in the middle of an even number: their geometric mean, so that multiples of times are the inverse
    of those of speeds."""
    return math.sqrt(statistics.median_low(ratios) * statistics.median_high(ratios))


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


def extremes(section: Section, timing: Timing) -> tuple[float, float]:
    """The least and the most of the same in a round; 1 and 1 of what is compared with itself, or with nothing."""
    found = _ratios(section, timing)
    return (min(found), max(found)) if found else (1.0, 1.0)


def best(section: Section, timing: Timing) -> float | None:
    """The same of the least times, which other work on the machine moves least."""
    rates = [each.work / each.low for each in section.timings if _is_baseline(section, each, timing.group)]
    return timing.work / timing.low / max(rates) if rates else None


def _is_baseline(section: Section, each: Timing, group: str) -> bool:
    return each.group == group and each.name in section.baseline


def as_json(
    sections: Sequence[Section],
    signature: dict[str, Any],
    choices: Sequence[Choice],
    machine: Roofline,
    peers: dict[str, str],
    command: str,
    finished: bool = True,
    version: dict[str, Any] | None = None,
    effort: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """finished: whether these are all that the command measures. version: of this package. effort: how many rounds,
    whether the cases are those of --quick, which mechanisms were asked for, for how long others used the cores, and
    digests of the cells of a spec."""
    return {
        "schema_version": SCHEMA,
        "command": command,
        **(version or {}),
        "finished": finished,
        **(effort or {}),
        "signature": signature,
        "machine": {"flops": machine.flops, "bandwidth": machine.bandwidth},
        "peers": peers,
        "choices": [choice._asdict() for choice in choices],
        "sections": [
            {
                "title": section.title,
                "baseline": list(section.baseline),
                "unit": section.unit,
                "limit": section.limit,
                "exponents": section.exponents and {name: each._asdict() for name, each in section.exponents.items()},
                "timings": [
                    {**each._asdict(), "relative": relative(section, each), "best": best(section, each)}
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
    """One a section: names down, groups across, each with its multiple of the baseline."""
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
                line.append(_slope(section.exponents, name))
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


def _slope(exponents: dict[str, Exponent], name: str) -> str:
    """With its sizes, where others have more."""
    found = exponents.get(name)
    if found is None:
        return ""
    whole = min(each.least for each in exponents.values()), max(each.most for each in exponents.values())
    text = f"{found.slope:.2f}" + ("" if found.spread is None else f" ±{found.spread:.2f}")
    text += "" if found.last is None else f", last {found.last:.2f}"
    return text + ("" if (found.least, found.most) == whole else f" ({found.least:,} to {found.most:,})")


def _note(section: Section) -> str:
    parts = ["Work a second" if section.unit else "Time of a call"]
    if section.in_float32:
        parts.append(" in float32")
    if section.baseline:
        base = section.baseline[0] if len(section.baseline) == 1 else f"the faster of {' and '.join(section.baseline)}"
        parts.append(f"; x: in multiples of that of {base}. Multiples are medians of those of single rounds")
    of_what = "them" if section.baseline else "the rounds"
    parts.append(f". ±: half of what lies between the least and the most of {of_what}, in parts of the median")
    if section.baseline:
        parts.append("; where the multiple is that of a thing to itself, of its times")
    if any(each.share is not None for each in section.timings):
        parts.append(f". %: of the rate at which the machine does {section.limit} in the same rounds")
        if "scores" in section.limit:
            parts.append(", from caches where they are small")
    if section.exponents:
        parts.append(". Exponent: the slope of log time over log size, the median of those of single rounds, ± half of")
        parts.append(" what lies between the least and the most of them; last: between the two largest sizes")
    if any(name.endswith("as shipped") for name in section.baseline):
        parts.append(". As shipped: with torch's own choice of matrix library and memory; else with those made here")
    first = sum(each.first for each in section.timings)
    return f"{''.join(parts)}. First calls, not counted: {_duration(first)} in all."


def _entry(section: Section, timing: Timing) -> str:
    """`131 us x 1.20 ±3%, 40%` of a call, with how much longer it takes, and its share; `3,200/s x 0.95 ±3%, 40%` of a
    rate."""
    ratio = relative(section, timing)
    text = f"{timing.rate:,.0f}/s" if section.unit else _duration(timing.median)
    if ratio is not None:
        text += f" x {ratio if section.unit else 1 / ratio:.2f}"
    if timing.low < timing.high:  # one round has no spread
        text += f" ±{100 * _spread(section, timing):.0f}%"
    return text if timing.share is None else f"{text}, {100 * timing.share:.0f}%"


def _spread(section: Section, timing: Timing) -> float:
    """Half of what lies between the least and the most of a figure's rounds, in parts of the median."""
    found = _ratios(section, timing) if section.unit else [1 / ratio for ratio in _ratios(section, timing)]
    least, most = (min(found), max(found)) if found else (1.0, 1.0)
    if least == most:  # against itself, or nothing
        return (timing.high - timing.low) / (2 * timing.median)
    return (most - least) / (2 * _median(found))


def _duration(seconds: float) -> str:
    """Three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= 0.9995 * size or unit == "ns":
            break
    number = seconds / size
    return f"{number:,.0f} {unit}" if number >= 99.95 else f"{number:.3g} {unit}"


def head_lines(signature: dict[str, Any], choices: Sequence[Choice], machine: Roofline) -> list[str]:
    lines = [", ".join(f"{name} {value}" for name, value in signature.items() if value is not None)]
    rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in machine.flops.items())
    lines.append(f"measured: matrix products {rates}; copies {machine.bandwidth / 1e9:,.1f} GB/s")
    for choice in choices:
        gain = "" if choice.gain is None else f": {choice.gain:.2f} times as fast as {choice.than}"
        lines.append(f"{choice.what}: {choice.chosen}{gain}")
    return lines


def markdown(found: Sequence[Table], head: Sequence[str], command: str) -> str:
    """A page: the command, what `head_lines` says, the tables with their notes."""
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


Key = tuple[str, str, str]
"""Section, group and name of a ratio."""
_PACE = ", against "
"""Before what the machine does, in the name of a ratio that is of it: its size says nothing by itself."""
OF_TORCH = ("torch.softmax", "SDPA")
"""Baselines that are not of this package."""


class Fall(NamedTuple):
    """A ratio that is lower than it was."""

    section: str
    group: str
    name: str
    before: float
    now: float

    def __str__(self) -> str:
        known = "" if _PACE in self.name else f" ({self.before:.3g}, now {self.now:.3g} times as fast)"
        case = f"{self.section}: {self.name} ({self.group})"
        part = f"{self.now / self.before:.2f} of what it was beside what it is compared with{known}"
        return f"{case} is at {part}, by the least times"


class Comparison(NamedTuple):
    """fallen: worst first. gone: (section, group, name) of cases that were measured then, in a group that is measured
    now. compared: how many ratios. other: how many ratios of then have no counterpart now. notes: what else a reader
    should know. outrun: ratios that fell because what they are of became faster, while the case itself did not become
    slower."""

    fallen: list[Fall]
    gone: list[Key]
    compared: int
    other: int
    notes: tuple[str, ...] = ()
    outrun: tuple[Fall, ...] = ()

    @property
    def worse(self) -> bool:
        """Whether anything is worse than it was, or nothing can be told."""
        return bool(self.fallen or self.gone or not self.compared)


def compare(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> Comparison:
    """Which ratios of least times fell by more than `tolerance`, a part of what they were: of what is done here, not of
    other packages, and beside them only where their version is the same. A ratio is outrun whose case is as fast as it
    was, but for half of `tolerance`, by the clock and beside the machine's products or copies."""
    renewed = [name for name in before["peers"] if now["peers"].get(name) not in (None, before["peers"][name])]
    bases = [
        {each["title"]: set(each.get("baseline", ())) for each in document["sections"]} for document in (before, now)
    ]
    moved = {title for title in bases[0].keys() & bases[1].keys() if bases[0][title] != bases[1][title]}
    old, new = (
        {key: ratio for key, ratio in ratios(each, renewed) if _package(key[2]) is None and key[0] not in moved}
        for each in (before, now)
    )
    both = [(key, old[key], ratio) for key, ratio in new.items() if key in old]
    lower = [Fall(*key, was, ratio) for key, was, ratio in both if ratio < was * (1 - tolerance)]
    speeds, held = _speeds(now), _speeds(before)
    outrun = [
        fall for fall in lower if all(
            new >= (1 - tolerance / 2) * old
            for new, old in zip(speeds.get(fall[:3], (0.0,)), held.get(fall[:3], (math.inf,)), strict=False)
        )
    ]  # fmt: skip
    fallen = [fall for fall in lower if fall not in outrun]
    measured, groups = set(_keys(now)), {key[:2] for key in _keys(now)}
    left_out = [peer for peer in before["peers"] if peer not in now["peers"]]
    gone = [
        key for key in _keys(before) if key[:2] in groups and key not in measured and _package(key[2]) not in left_out
        and _package(key[2]) not in renewed
    ]  # fmt: skip
    other = sum(key not in new and key not in gone for key in old)
    beside = {_package(name) for section in before["sections"] for name in section.get("baseline", ())}
    said = [
        f"{name} was {before['peers'][name]}, now {now['peers'][name]}: what is timed beside it is not compared"
        for name in renewed if name in beside
    ]  # fmt: skip
    said += [f"{title}: beside other packages than it was, and not compared" for title in sorted(moved)]
    said += [
        f"{name} was {before[name]}, now {now[name]}: least times of other cases or rounds"
        for name in ("rounds", "quick") if name in before and name in now and before[name] != now[name]
    ]  # fmt: skip
    busy = max(float(each.get("shared_seconds") or 0) for each in (before, now))
    if busy:
        said.append(
            f"other programs used the same processor cores for {busy:.0f} s of one of the two: what fell may be their "
            "doing; measure on idle cores before it is believed"
        )
    worst = sorted(fallen, key=lambda fall: fall.now / fall.before)
    return Comparison(worst, gone, len(both), other, tuple(said), tuple(outrun))


def _speeds(document: dict[str, Any]) -> dict[Key, tuple[float, float]]:
    """Of each case, beside the machine's and by the clock; noise in one of them hides no fall."""
    return {
        (section["title"], each["group"], each["name"]): (each["pace"], 1 / each["low"])
        for section in document["sections"]
        for each in section["timings"]
        if each.get("pace") is not None and each.get("low")
    }


_CASES_OF = {
    "entmax: ": "entmax", "adasplash: ": "adasplash", "CTranslate2": "ctranslate2", "torch.nn": "torch",
    "transformers' ": "transformers",
}  # fmt: skip
"""How the names of the cases of other packages begin."""


def _package(name: str) -> str | None:
    """The package that a case is of; None for those of here, and for functions of torch beside which they stand."""
    return next((package for start, package in _CASES_OF.items() if name.startswith(start)), None)


def _keys(document: dict[str, Any]) -> Iterator[Key]:
    for section in document["sections"]:
        for each in section["timings"]:
            yield section["title"], each["group"], each["name"]


def ratios(document: dict[str, Any], without: Sequence[str] = ()) -> Iterator[tuple[Key, float]]:
    """Of least times against the baseline; for baselines of ours, and where there is none, the pace beside what the
    machine does, since a slowdown of all cases moves no other ratio. without: packages beside which none is wanted."""
    for section in document["sections"]:
        if any(_package(name) in without for name in section.get("baseline", ())):
            continue
        for each in section["timings"]:
            title, group, name = section["title"], each["group"], each["name"]
            if each["best"] is not None:
                yield (title, group, name), each["best"]
            own = each["best"] is None or (name in section.get("baseline", ()) and name not in OF_TORCH)
            if own and each.get("pace") is not None:
                yield (title, group, f"{name}{_PACE}{section['limit']}"), each["pace"]
