"""One measurement of speed from its options to its report."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnbench.bench.machine import Choice, Roofline, roofline, set_up, signature
from attnbench.bench.ops import mechanism
from attnbench.bench.peers import Peer, find, serves
from attnbench.bench.plans import OF_SIZES, PLANS, TITLES, Plan, What, beyond, every_kind, kinds_of
from attnbench.bench.plot import draw
from attnbench.bench.results import SCHEMA, Section, as_json, compare, head_lines, markdown, ratios, tables
from attnbench.bench.subjects import SIZES, Subject
from attnbench.core import native, processor
from attnbench.core.contention import watched
from attnbench.core.errors import MissingExtraError, SpecError
from attnbench.core.files import require_writable, write_atomic
from attnbench.core.spec import unknown
from attnbench.core.version import version
from attnbench.train.runtime import choose_device, choose_runtime, use_device, use_no_tf32, use_threads

if TYPE_CHECKING:
    from rich.console import Console


_log = logging.getLogger("attnbench")
_UNFINISHED = "unfinished"
_SHARED = "other programs used the same processor cores for {:.0f} s: figures are less certain"
_SHAPES = (
    "shapes: batch x heads x queries x keys (x width of a head); of what is decoded, sources x tokens of each, EOS "
    "counted"
)
_MODELS = (
    "models: on random words of a vocabulary of {vocabulary:,}; updates on {batches} batches of at most "
    "{padded tokens a side:,} padded tokens a side, searches for outputs of {output tokens} tokens, EOS or not"
)
_CELLS = (
    "cells: on random words of their vocabularies; updates on {batches} batches of theirs, searches for outputs of "
    "{output tokens} tokens, EOS or not"
)
NOTHING_IN_COMMON = "--compare: the two measurements have no figure in common; run what the earlier one ran"


@dataclass(frozen=True)
class Report:
    """document: what JSON holds."""

    document: dict[str, Any]
    sections: list[Section]
    head: list[str]
    command: str

    def show(self, console: Console) -> None:
        from rich.table import Table
        from rich.text import Text

        for line in self.head:
            console.print(line, markup=False)
        for table in tables(self.sections):
            caption = Text(table.note, "table.caption")
            shown = Table(
                title=Text(table.title, "table.title"), title_justify="left", caption=caption, caption_justify="left"
            )
            for title in table.head:
                shown.add_column(Text(title))
            for line in table.lines:
                shown.add_row(*map(Text, line))
            console.print(shown)

    def write(self, folder: Path, stem: str = "speed") -> bool:
        """speed.json, speed.md and, where matplotlib is installed, speed.svg; whether it is. stem: instead of speed."""
        self._write(folder, stem)
        for path in _paths(folder, _UNFINISHED):
            path.unlink(missing_ok=True)
        picture = folder / f"{stem}.svg"
        drawn = draw(self.sections, picture)
        if not drawn:  # or one of other figures would stand beside these
            picture.unlink(missing_ok=True)
        return drawn

    def write_unfinished(self, folder: Path) -> Path:
        """The page of what is measured so far, and its JSON; an earlier measurement stays until this one is whole."""
        return self._write(folder, _UNFINISHED)

    def _write(self, folder: Path, stem: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        data, page = _paths(folder, stem)
        write_atomic(data, json.dumps(self.document, indent=1) + "\n")
        write_atomic(page, markdown(list(tables(self.sections)), self.head, self.command))
        return page


def _paths(folder: Path, stem: str) -> tuple[Path, Path]:
    return folder / f"{stem}.json", folder / f"{stem}.md"


def _require_comparable(
    earlier: dict[str, Any], signature: dict[str, Any], what: Sequence[What], groups: Set[str],
    cells: Mapping[str, str], work: Mapping[str, Any],
) -> None:  # fmt: skip
    """Raise SpecError where the earlier figures depend on other things, or none will be measured, as far as their file
    tells. groups: what the models that will be timed are compared within. cells: of a spec, label -> digest. work: what
    whole models will be timed with."""

    def returns(title: str, group: str) -> bool:
        return any(
            title.startswith(TITLES[each])
            and (each not in OF_SIZES or any(group == known or group.startswith(f"{known}, ") for known in groups))
            for each in what
        )

    if not any(returns(title, group) for (title, group, _), _ in ratios(earlier)):
        raise SpecError(NOTHING_IN_COMMON)
    noted = earlier.get("cells") or {}
    changed = [name for name, digest in cells.items() if noted.get(name, digest) != digest]
    if noted and (changed or next(iter(noted)) != next(iter(cells), None)):
        other = (
            f"the first cell was '{next(iter(noted))}'"
            if not changed
            else f"'{changed[0]}' was another model, or trained otherwise"
        )
        raise SpecError(f"--compare: these cells are not those of the earlier measurement: {other}; measure both alike")
    was = earlier["signature"]
    without = {"precision"} if set(what) == {"transforms"} else set[str]()  # they are float32 whatever was asked for
    both = [name for name in signature if name in was and name not in without]
    differ = [f"{name} ({was[name]}, now {signature[name]})" for name in both if was[name] != signature[name]]
    was = dict(earlier.get("work") or {})
    before, now = was.pop("models", {}), work.get("models", {})
    differ += [f"{name} ({was[name]}, now {work[name]})" for name in was if name in work and was[name] != work[name]]
    differ += [f"another model '{name}'" for name in before if now.get(name, before[name]) != before[name]]
    if differ:
        raise SpecError(
            f"--compare: these figures are not of the same kind: {'; '.join(differ)}; measure as the earlier one was, "
            "or compare with another"
        )


def _require_folder(folder: Path) -> None:
    """Raise SpecError where the files of a report cannot be written to it, which is made."""
    require_writable(folder, "--out", folder=True)
    for stem in ("speed", "now", _UNFINISHED):
        for path in (*_paths(folder, stem), folder / f"{stem}.svg"):
            require_writable(path, "--out", folder=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--out {folder}: it cannot be made ({error.strerror}); name another place") from None


def run(
    what: Sequence[What], *, device: str | None, precision: str, threads: int | None,
    rounds: int, quick: bool, against: str | None, size: str | None, only: str | None = None,
    cells: Sequence[Subject] = (), command: str, earlier: dict[str, Any] | None = None, folder: Path | None = None,
    keep: Callable[[Report], None] | None = None,
) -> Report:  # fmt: skip
    """Measure each of `what` (keys of PLANS). cells: of a spec, instead of the models that there are. earlier: what it
    will be compared with. folder: where what is measured will be written. keep: called with all that is measured so
    far, whenever that is more.

    Raises SpecError and MissingExtraError before anything is timed, AttnbenchError where a case cannot be.
    """
    peers, sizes, kinds = find(_names("--against", against)), _names("--size", size), _names("--only", only)
    place = _place(device)
    _require_use(what, place, peers, sizes, cells, precision)
    _require_kinds(what, kinds, earlier)
    cores = processor.usable_cores()
    if threads is not None and threads > cores:
        limit = " as OMP_NUM_THREADS says" if processor.cores_are_limited() else ""
        raise SpecError(f"--threads {threads}: {cores} cores can be used here{limit}; give that many at most")
    use_threads(threads or cores)
    use_no_tf32()
    runtime = choose_runtime(place, "bf16" if precision == "bf16" else "fp32")
    if runtime.precision != precision:
        raise MissingExtraError(
            f"--precision {precision}: this device has no instructions for it, and training takes float32 instead; "
            "measure fp32"
        )
    choices: list[Choice] = set_up(runtime)
    made = signature(runtime)
    plan = Plan(runtime, rounds, quick, peers, sizes or None, kinds, cells)
    digests = {each.name: each.digest() for each in cells}
    work = plan.work if set(what) & set(OF_SIZES) else {}
    if earlier is not None:
        _require_comparable(earlier, made, what, plan.groups, digests, work)
    if folder is not None:
        _require_folder(folder)
    machine: Roofline = roofline(place)
    own = version()
    versions = {peer.package: peer.version for peer in peers}

    def report(sections: list[Section], machine: Roofline, *, finished: bool) -> Report:
        head = [_titled(own), *head_lines(made, choices, machine)]
        head.append(f"compiling: {native.compiling_seconds():.1f} s, before anything was timed or in first calls")
        head += [_SHARED.format(beside.seconds)] if beside.seconds else []
        head += [(_CELLS if cells else _MODELS).format(**work)] if work else []
        head += [_SHAPES] if set(what) != {"train"} else []
        head += [] if finished else ["not finished"]
        effort = {"rounds": rounds, "quick": quick, "only": kinds or None, "shared_seconds": beside.seconds,
                  "cells": digests or None, "work": work or None}  # fmt: skip
        document = as_json(sections, made, choices, machine, versions, command, finished, own, effort)
        return Report(document, sections, head, command)

    done: list[Section] = []
    with watched(_log.warning) as beside:
        for each in what:
            sections: list[Section] = []
            for sections in PLANS[each](plan):
                if keep is not None:
                    keep(report([*done, *sections], machine, finished=False))
            done += sections
    return report(done, machine.better_of(roofline(place)), finished=True)


def _names(option: str, listed: str | None) -> list[str]:
    """What an option names with commas, each once. Raises SpecError where it is given and names nothing."""
    found = list(dict.fromkeys(each for name in (listed or "").split(",") if (each := name.strip())))
    if listed is not None and not found:
        raise SpecError(f"{option} '{listed}': names nothing; leave it out, or give names with commas")
    return found


def _place(device: str | None) -> torch.device:
    place = choose_device(device)
    if place.type not in ("cpu", "cuda"):
        raise SpecError(f"--device {device}: speed is measured on cpu and cuda; name one of them")
    return use_device(place)


def _require_use(
    what: Sequence[What], place: torch.device, peers: Sequence[Peer], sizes: Sequence[str],
    cells: Sequence[Subject], precision: str,
) -> None:  # fmt: skip
    """Raise SpecError for a name that there is not, or for what changes nothing."""
    if precision != "fp32" and set(what) == {"transforms"}:
        raise SpecError(f"--precision {precision}: transforms are timed in float32; leave it out, or time attention")
    for name in sizes:
        if name not in SIZES:
            raise SpecError(f"--size: {unknown('size', name, list(SIZES))}")
    for option in (["--size"] if sizes else []) + (["--spec"] if cells else []):
        if not set(what) & set(OF_SIZES):
            raise SpecError(
                f"{option}: {', '.join(what)} times no models; leave it out, or time {' or '.join(OF_SIZES)}"
            )
    idle = [said for peer in peers if (said := _does_nothing(peer, what, place, cells))]
    if idle and len(idle) == len(peers):
        raise SpecError(f"{'; '.join(idle)}; leave it out")
    for said in idle:
        _log.warning("%s; the others are timed", said)


def _does_nothing(peer: Peer, what: Sequence[What], place: torch.device, cells: Sequence[Subject]) -> str | None:
    """What is said of a peer that nothing of this measurement stands beside; None of others."""
    if not any(serves(peer, each, place) for each in what):
        where = f"on {place.type}"
    else:
        only_models = all(each in OF_SIZES for each in what if serves(peer, each, place))
        beside = "train" in what and any(peer.models(each, 1, place) for each in cells if peer.models)
        where = "of these cells" if cells and only_models and not beside else None
    if where is None:
        return None
    return f"--against {peer.package}: it does nothing that could be timed beside {', '.join(what)} {where}"


def _require_kinds(what: Sequence[What], kinds: Sequence[str], earlier: dict[str, Any] | None) -> None:
    """Raise SpecError for a kind of mechanism that is not timed, and where a selection makes no sense."""
    timed, known = set[str]().union(*map(kinds_of, what)), every_kind()
    if kinds and not timed:
        raise SpecError(f"--only: {', '.join(what)} times all its cases; leave it out")
    for kind in kinds:
        if kind not in known:
            raise SpecError(f"--only: {unknown('mechanism', kind, sorted(known))}")
        if kind not in timed:
            raise SpecError(f"--only {kind}: {', '.join(what)} does not time it; leave it out")
    for kind in (kind for each in what for kind in beyond(each, kinds)):
        try:
            mechanism(kind)
        except ValueError as error:
            raise SpecError(
                f"--only {kind}: it is timed as a budget or its defaults make it, which fails: {error}"
            ) from None
    if kinds and earlier is not None and sorted(kinds) != sorted(earlier.get("only") or ()):
        raise SpecError(
            "--only: what the earlier measurement has besides would be gone; compare with one of the same --only, or "
            "leave one of the two out"
        )


def _titled(own: dict[str, Any]) -> str:
    commit = f", commit {own['commit'][:12]}{' and changes to it' if own['dirty'] else ''}" if own["commit"] else ""
    return f"attnbench {own['attnbench']}{commit}"


def read_earlier(path: Path) -> dict[str, Any]:
    """What --out wrote. Raises SpecError for another file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SpecError(f"--compare {path}: it cannot be read ({error}); name a speed.json of --out") from None
    known = isinstance(document, dict) and document.get("schema_version") == SCHEMA
    if not known or not _is_measurement(document):
        raise SpecError(f"--compare {path}: it holds no measurement of `attnbench speed`; name a speed.json of --out")
    if not document.get("finished", True):
        raise SpecError(f"--compare {path}: this measurement was not finished; name a speed.json")
    return document


def _is_measurement(document: dict[str, Any]) -> bool:
    """Whether it can be compared with, which nobody wants to learn when all is timed."""
    if not all(isinstance(document.get(name), dict) for name in ("signature", "peers")):
        return False
    try:
        compare(document, document, 0.1)
        return all(math.isfinite(ratio) for _, ratio in ratios(document))
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError):
        return False
