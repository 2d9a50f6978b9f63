"""What a person sees of a running cell: plain lines, seldom, on stderr."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

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
    if "valid/loss" in record:
        bleu = f", BLEU {record['valid/bleu']:.2f}" if "valid/bleu" in record else ""
        return f"step {record['step']}: valid loss {record['valid/loss']:.3f}, ppl {record['valid/ppl']:.2f}{bleu}"
    return ""
