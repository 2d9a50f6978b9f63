"""What is said of the processor."""

from __future__ import annotations

import os

import pytest

from attnbench.core import processor
from attnbench.core.processor import cores_are_limited, name, usable_cores


@pytest.mark.parametrize(("asked", "cores"), [
    ("1", 1), ("3", 3), ("9", 4), ("", 4), ("0", 4), ("many", 4), ("2,1", 2), (" 3 ", 3),
])  # fmt: skip
def test_threads_are_those_the_process_may_use(monkeypatch, asked, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(processor, "_quotas", lambda: [])
    assert usable_cores() == cores


@pytest.mark.parametrize(("asked", "limited"), [("1", True), ("3", True), ("4", False), ("9", False), ("", False)])
def test_cores_are_limited_where_more_could_be_used(monkeypatch, asked, limited):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(processor, "_quotas", lambda: [])
    assert cores_are_limited() == limited


@pytest.mark.parametrize(("quotas", "cores"), [([], 4), ([0.5], 1), ([2.0, 3.5], 2), ([2.5], 3), ([64.0], 4)])
def test_no_more_than_a_container_may_use(monkeypatch, quotas, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processor, "_quotas", lambda: quotas)
    assert usable_cores() == cores


@pytest.mark.parametrize(("groups", "files", "quotas"), [
    ("0::/jobs/mine\n", {"jobs/mine/cpu.max": "max 100000", "jobs/cpu.max": "250000 100000"}, [2.5]),
    ("0::/../host/path\n", {"cpu.max": "50000 100000"}, [0.5]),
    ("4:memory:/m\n3:cpu,cpuacct:/docker/ab\n0::/docker/ab\n",
     {"cpu,cpuacct/cpu.cfs_quota_us": "400000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, [4.0]),
    ("3:cpuacct,cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}, [1.5]),
    ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
    ("0::/\n", {"cpu.max": "much"}, []), ("0::/\n", {}, []), ("nothing\n", {}, []), (None, {}, []),
])  # fmt: skip
def test_quotas_are_read_of_both_kinds_of_control_groups(tmp_path, groups, files, quotas):
    if groups is not None:
        (tmp_path / "cgroup").write_text(groups)
    for place, content in files.items():
        at = tmp_path / "root" / place
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(content + "\n")
    assert list(processor._quotas(tmp_path / "cgroup", tmp_path / "root")) == quotas


def test_a_processor_has_a_name_or_none_is_told():
    assert name() == name().strip()
