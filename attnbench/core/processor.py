"""The processor this process runs on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def name() -> str:
    """What the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def identity() -> bytes:
    """What compiled code and figures of speed hang on; a cache may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith((b"model name", b"flags", b"Features"))]
    return b"\0".join([platform.machine().encode(), platform.processor().encode(), *flags[:2]])


def usable_cores() -> int:
    """The cores this process is bound to, and no more than OMP_NUM_THREADS where that is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdecimal() and int(asked) else cores
