"""What a person sees of a running cell on stderr: a bar on a terminal, plain lines, seldom, off it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attnbench.experiment.pipeline import Listener

log = logging.getLogger("attnbench")
PAUSE = 30.0
"""Seconds between two plain lines about training; validations and events are always told."""


def plain_listener(label: str, seed: int) -> Listener:
    """A listener that logs validations, events, and a training line every half minute."""
    last = 0.0

    def listen(record: Mapping[str, Any]) -> None:
        nonlocal last
        text = describe(record)
        routine = "train/loss" in record
        if not text or (routine and time.monotonic() - last < PAUSE):
            return
        if routine:
            last = time.monotonic()
        log.info("[%s, seed %d] %s", label, seed, text)

    return listen


def describe(record: Mapping[str, Any]) -> str:
    """One line for one record of the log."""
    if "event" in record:
        return str(record["event"])
    if "train/loss" in record:
        return (
            f"step {record['step']}, epoch {record['epoch']}: loss {record['train/loss']:.3f}, "
            f"{record['train/tokens_per_s']:.0f} tokens/s, lr {record['train/lr']:.2e}"
        )
    if "epoch/train_loss" in record:
        return f"epoch {record['epoch']}: {record['epoch/seconds']:.1f} s, train loss {record['epoch/train_loss']:.3f}"
    if "valid/loss" in record:
        bleu = f", BLEU {record['valid/bleu']:.2f}" if "valid/bleu" in record else ""
        return f"step {record['step']}: valid loss {record['valid/loss']:.3f}, ppl {record['valid/ppl']:.2f}{bleu}"
    return ""


class Bars:
    """For a terminal: one bar for the cell that runs, its loss and speed behind it; events and validations above it."""

    def __init__(self, console: Console) -> None:
        self._columns = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[state]}", markup=False), console=console, transient=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._columns.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._columns.stop()

    def listener(self, label: str, seed: int, steps: int, epochs: int | None = None) -> Listener:
        """A listener that moves a new bar of `steps` updates, or fewer: as many as `epochs` epochs turn out to have."""
        name = f"{label}, seed {seed}"
        for old in self._columns.task_ids:
            self._columns.remove_task(old)
        bar = self._columns.add_task(name, total=steps, state="")
        passed = 0

        def listen(record: Mapping[str, Any]) -> None:
            nonlocal passed
            text = describe(record)
            if "step" in record:
                self._columns.update(bar, completed=record["step"])
            if epochs is not None and record.get("epoch", 0) > passed:  # an epoch has just ended
                passed = record["epoch"]
                self._columns.update(bar, total=min(steps, round(record["step"] * epochs / passed)))
            if "train/loss" in record:
                state = f"loss {record['train/loss']:.3f}, {record['train/tokens_per_s']:.0f} tokens/s"
                self._columns.update(bar, state=state)
            elif text:
                self._columns.console.print(f"[{name}] {text}", markup=False)

        return listen
