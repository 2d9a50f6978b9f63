"""What is said of the processor."""

from __future__ import annotations

import os

import pytest

from attnbench.core.processor import name, usable_cores


@pytest.mark.parametrize(("asked", "cores"), [("1", 1), ("3", 3), ("9", 4), ("", 4), ("0", 4), ("many", 4)])
def test_threads_are_those_the_process_may_use(monkeypatch, asked, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert usable_cores() == cores


def test_a_processor_has_a_name_or_none_is_told():
    assert name() == name().strip()
