"""What the command line says of a run of cells: where, on what, how many at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from attnbench.experiment.grid import Experiment


@dataclass(frozen=True)
class Settings:
    """What the command line says of where and how: no part of what a cell is, though device and threads move its
    numbers by rounding, and its speeds.

    jobs: cells at a time; None: as many as get most done, which is measured. source: a folder to prepare data from.
    fresh: forget what unfinished and finished cells left.
    terminal: where bars are drawn; None: plain lines.
    """

    runs: Path
    cache: Path
    jobs: int | None = 1
    device: str | None = None
    fresh: bool = False
    source: Path | None = None
    offline: bool = False
    terminal: Console | None = None


def root_of(experiment: Experiment, settings: Settings) -> Path:
    """The folder of the experiment's table."""
    return settings.runs / experiment.name
