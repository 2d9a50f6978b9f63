"""One measurement of speed from its options to its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.bench.machine import Choice, Roofline, roofline, set_up, signature
from attnbench.bench.models import SIZES
from attnbench.bench.peers import find
from attnbench.bench.plans import PLANS, Plan
from attnbench.bench.plot import draw
from attnbench.bench.results import SCHEMA, Fall, Section, as_json, falls, head_lines, markdown, tables
from attnbench.core import processor
from attnbench.core.errors import SpecError
from attnbench.core.files import write_atomic
from attnbench.core.spec import unknown
from attnbench.train.runtime import choose_device, choose_runtime, use_threads

if TYPE_CHECKING:
    from rich.console import Console


_UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Report:
    """document: what JSON holds."""

    document: dict[str, Any]
    sections: list[Section]
    head: list[str]
    command: str

    def show(self, console: Console) -> None:
        from rich.table import Table

        for line in self.head:
            console.print(line, markup=False)
        for table in tables(self.sections):
            shown = Table(*table.head, title=table.title, title_justify="left")
            for line in table.lines:
                shown.add_row(*line)
            console.print(shown)

    def write(self, folder: Path) -> bool:
        """speed.json, speed.md and, where matplotlib is installed, speed.svg; whether it is."""
        self._write(folder, "speed")
        for path in _paths(folder, _UNFINISHED):
            path.unlink(missing_ok=True)
        return draw(self.sections, folder / "speed.svg")

    def write_unfinished(self, folder: Path) -> Path:
        """The page of what is measured so far, and its JSON; an earlier measurement stays until this one is whole."""
        return self._write(folder, _UNFINISHED)

    def _write(self, folder: Path, stem: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        data, page = _paths(folder, stem)
        write_atomic(data, json.dumps(self.document, indent=1) + "\n")
        write_atomic(page, markdown(list(tables(self.sections)), self.head, self.command))
        return page

    def falls(self, earlier: dict[str, Any], tolerance: float) -> tuple[list[Fall], int]:
        """Raises SpecError where the two have no figure in common."""
        found, compared = falls(earlier, self.document, tolerance)
        if not compared:
            raise SpecError("--compare: the two measurements have no figure in common; run what the earlier one ran")
        return found, compared


def _paths(folder: Path, stem: str) -> tuple[Path, Path]:
    return folder / f"{stem}.json", folder / f"{stem}.md"


def _same_kind(earlier: dict[str, Any], signature: dict[str, Any]) -> None:
    """Raise SpecError where the earlier figures hang on other things, as far as their file tells."""
    was = earlier["signature"]
    both = [name for name in signature if name in was]
    differ = [f"{name} ({was[name]}, now {signature[name]})" for name in both if was[name] != signature[name]]
    if differ:
        raise SpecError(f"--compare: these figures are not of the same kind: {'; '.join(differ)}")


def run(
    what: Sequence[str], *, device: str | None, precision: str, threads: int | None,
    rounds: int, quick: bool, against: str | None, size: str | None, command: str,
    earlier: dict[str, Any] | None = None, keep: Callable[[Report], None] | None = None,
) -> Report:  # fmt: skip
    """Measure each of `what` (keys of PLANS). earlier: what it will be compared with. keep: called with all that is
    measured so far, whenever that is more.

    Raises SpecError and MissingExtraError before anything is timed, AttnbenchError where a case cannot be.
    """
    peers = find(against.split(",") if against else [])
    sizes = size.split(",") if size else None
    for name in sizes or []:
        if name not in SIZES:
            raise SpecError(f"--size: {unknown('size', name, list(SIZES))}")
    place = choose_device(device)
    if place.type not in ("cpu", "cuda"):
        raise SpecError(f"--device {device}: speed is measured on cpu and cuda")
    use_threads(threads or processor.usable_cores())
    runtime = choose_runtime(place, "bf16" if precision == "bf16" else "fp32")
    if runtime.precision != precision:
        raise SpecError(
            f"--precision {precision}: this device has no instructions for it, and training takes float32 instead; "
            "measure fp32"
        )
    choices: list[Choice] = set_up(runtime)
    made = signature(runtime)
    if earlier is not None:
        _same_kind(earlier, made)
    machine: Roofline = roofline(place)
    plan = Plan(runtime, rounds, quick, peers, machine.flops[runtime.precision], sizes)
    versions = {peer.package: peer.version for peer in peers}

    def report(sections: list[Section], machine: Roofline, *, finished: bool) -> Report:
        sections = [_against(machine.flops[runtime.precision], section) for section in sections]
        head = [*head_lines(made, choices, machine), *([] if finished else ["not finished"])]
        return Report(as_json(sections, made, choices, machine, versions, command, finished), sections, head, command)

    done: list[Section] = []
    for each in what:
        sections: list[Section] = []
        for sections in PLANS[each](plan):  # pyright: ignore[reportArgumentType]
            if keep is not None:
                keep(report([*done, *sections], machine, finished=False))
        done += sections
    return report(done, machine.better_of(roofline(place)), finished=True)


def _against(peak: float, section: Section) -> Section:
    """Its shares are of this rate of products."""
    return section if section.peak_flops is None else section._replace(peak_flops=peak)


def read_earlier(path: Path) -> dict[str, Any]:
    """What --out wrote. Raises SpecError for another file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise SpecError(f"--compare {path}: it cannot be read ({error})") from None
    known = isinstance(document, dict) and document.get("schema_version") == SCHEMA
    if not known or not {"sections", "signature"} <= set(document):
        raise SpecError(f"--compare {path}: it holds no measurement of `attnbench speed`; name a speed.json of --out")
    if not document.get("finished", True):
        raise SpecError(f"--compare {path}: this measurement was not finished; name a speed.json")
    return document
