"""The processor this process runs on."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


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
    """What compiled code and figures of speed depend on; a cache may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith((b"model name", b"flags", b"Features"))]
    return b"\0".join([platform.machine().encode(), platform.processor().encode(), *flags[:2]])


def usable_cores() -> int:
    """The cores this process is bound to, no more than its container may use of them (a quota, rounded up), and no more
    than OMP_NUM_THREADS where that is set."""
    return min(_given_cores(), _asked() or sys.maxsize)


def cores_are_limited() -> bool:
    """Whether OMP_NUM_THREADS lets this process use fewer of them than it might."""
    return usable_cores() < _given_cores()


def _given_cores() -> int:
    """Whatever OMP_NUM_THREADS says."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *(limit for limit in map(math.ceil, _quotas()) if limit > 0)])


def _asked() -> int | None:
    """Threads that OMP_NUM_THREADS names; None for no number from 1 on. OpenMP takes one for each level, too."""
    word = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(word) if word.isdecimal() and int(word) else None


def _quotas(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[float]:
    """Processors that Linux lets each control group of this process use, from its own up to the root: threads beyond
    them would wait for one another. In a container `root` may be its own group where `groups` names the host's path.
    """
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = PurePosixPath(path.lstrip("/"))
        for each in (own, *own.parents):
            # of the first kind the folder may be called otherwise than the list of its controllers
            quotas = (
                [_quota_v1(root / name / each) for name in (controllers, "cpu")]
                if controllers
                else [_quota(root / each)]
            )
            yield from (quota for quota in quotas if quota is not None and quota > 0)


def _quota(group: Path) -> float | None:
    """Of a group's cpu.max: `max 100000`, or microseconds of work in a period of so many."""
    try:
        allowed, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return None if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(group: Path) -> float | None:
    try:
        allowed, period = (group / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
        return int(allowed.read_text(encoding="ascii")) / int(period.read_text(encoding="ascii"))
    except (OSError, ValueError, ZeroDivisionError):
        return None
