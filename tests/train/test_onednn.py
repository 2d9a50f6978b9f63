"""Float32 products go to oneDNN where it is as exact and not slower; the machine's choice is kept."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.core import measured
from attnbench.core.bfloat16 import multiplies_bfloat16
from attnbench.train import onednn

MEET_SHAPES = """
import ctypes, torch
from attnbench.train.onednn import keep_few_products, keep_products_as_shipped
keep_few_products()
if {as_shipped}:
    keep_products_as_shipped()
class Mallinfo2(ctypes.Structure):
    _fields_ = [(str(at), ctypes.c_size_t) for at in range(10)]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
weight = torch.zeros(64, 64, dtype=torch.bfloat16)
for rows in range(1, 401):
    torch.zeros(rows, 64, dtype=torch.bfloat16) @ weight
    if rows % 200 == 0:
        print(getattr(libc.mallinfo2(), "7"))  # uordblks: bytes that are not free
"""
"""Bytes a process holds after it has multiplied 200 shapes, and after 400."""


@pytest.fixture
def matmul(tmp_path, monkeypatch) -> Any:
    """Torch's setting, put back afterwards, and a cache of its own."""
    setting = onednn._setting()
    if setting is None:
        pytest.skip("this torch has no such setting")
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    before = setting.fp32_precision
    setting.fp32_precision = "none"
    yield setting
    setting.fp32_precision = before


@pytest.fixture
def exact(matmul, monkeypatch):
    """A processor on which oneDNN gives other last digits than the default library, and is as exact."""
    monkeypatch.setattr(onednn.torch, "equal", lambda *pair: False)
    monkeypatch.setattr(onednn, "relative_error", lambda *given: 2e-7)
    return matmul


def gained(monkeypatch, gain):
    """The speed that would be measured; how often it was."""
    asked = []

    def measured(matmul):
        asked.append(matmul)
        matmul.fp32_precision = "bf16"
        return gain

    monkeypatch.setattr(onednn, "_gain", measured)
    return asked


def kept_file(tmp_path):
    (found,) = (tmp_path / "cache" / "machine").glob("products-*.json")
    return found


def test_float32_products_stay_float32_products_whatever_is_chosen(matmul):
    used = onednn.use_onednn_float32()
    assert onednn.onednn_in_use() is used
    left, right = (torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    exact = left.double() @ right.double()
    assert ((left @ right).double() - exact).norm() / exact.norm() < 1e-6


def test_it_is_measured_once_a_machine(exact, monkeypatch, tmp_path):
    asked = gained(monkeypatch, 1.7)
    assert onednn.use_onednn_float32()
    assert onednn.onednn_in_use()
    exact.fp32_precision = "none"
    assert not onednn.onednn_in_use()
    assert onednn.use_onednn_float32()
    assert onednn.use_onednn_float32()
    assert len(asked) == 1
    assert json.loads(kept_file(tmp_path).read_text())["onednn_gain"] == 1.7


def test_what_was_kept_decides(exact, monkeypatch, tmp_path):
    gained(monkeypatch, 0.5)
    assert not onednn.use_onednn_float32()
    assert exact.fp32_precision == "none"
    asked = gained(monkeypatch, 2.0)
    assert not onednn.use_onednn_float32()
    kept_file(tmp_path).unlink()
    assert onednn.use_onednn_float32()
    assert len(asked) == 1


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"onednn_gain": "fast"}'])
def test_a_broken_file_is_written_anew(broken, exact, monkeypatch, tmp_path):
    asked = gained(monkeypatch, 1.0)
    onednn.use_onednn_float32()
    kept_file(tmp_path).write_text(broken)
    assert onednn.use_onednn_float32()
    assert onednn.use_onednn_float32()
    assert len(asked) == 2


def test_without_a_cache_all_processes_choose_alike(exact, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder would be")
    asked = gained(monkeypatch, 0.1)
    assert onednn.use_onednn_float32()
    assert not asked


def test_a_kept_choice_is_read_where_nothing_can_be_written(exact, monkeypatch, tmp_path):
    gained(monkeypatch, 0.5)
    assert not onednn.use_onednn_float32()
    monkeypatch.setattr(measured, "making", lambda path: pytest.fail("a lock was asked for"))
    assert not onednn.use_onednn_float32()


def test_lower_accuracy_is_never_taken(exact, monkeypatch):
    asked = gained(monkeypatch, 9.0)
    monkeypatch.setattr(onednn, "relative_error", lambda *given: 1e-3)
    assert not onednn.use_onednn_float32()
    assert exact.fp32_precision == "none"
    assert not asked


def test_a_setting_that_changes_nothing_is_not_called_onednn(matmul, monkeypatch):
    """On processors for which torch knows no oneDNN in float32."""
    asked = gained(monkeypatch, 9.0)
    monkeypatch.setattr(onednn.torch, "equal", lambda *pair: True)
    assert not onednn.use_onednn_float32()
    assert not onednn.onednn_in_use()
    assert not asked


def test_both_libraries_are_timed_in_turns(monkeypatch):
    clock, seen = iter(range(10_000)), []
    setting = SimpleNamespace(fp32_precision="none")
    monkeypatch.setattr(onednn.torch, "mm", lambda *pair: seen.append(setting.fp32_precision))
    monkeypatch.setattr(measured.time, "perf_counter", lambda: next(clock))
    assert onednn._gain(setting) == 1
    assert seen == ["none", "bf16"] * onednn._ROUNDS
    assert setting.fp32_precision == "bf16"


def test_a_library_that_is_refused_is_told(monkeypatch, caplog):
    monkeypatch.setattr(measured, "gain", lambda ways, rounds, enough: enough / 2)
    with caplog.at_level(logging.INFO):
        assert onednn._gain(SimpleNamespace()) == onednn._SLOWER / 2
    assert "the default library, which is 2.2 times as fast here" in caplog.text


def test_what_onednn_gave_is_known_once_it_was_timed(matmul, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path))
    assert onednn.onednn_gain() is None
    measured.once("products", "onednn_gain", lambda: 1.5)
    assert onednn.onednn_gain() == 1.5


def test_a_torch_without_the_setting_keeps_its_own(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not onednn.use_onednn_float32()
    assert not onednn.onednn_in_use()


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no glibc that tells what is held"
)
@pytest.mark.skipif(not multiplies_bfloat16(torch.device("cpu")), reason="no products in bfloat16 by oneDNN")
@pytest.mark.parametrize("as_shipped", [False, True])
def test_memory_does_not_grow_with_the_shapes_that_were_met(as_shipped, monkeypatch):
    for name in onednn._CAPACITIES:
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", MEET_SHAPES.format(as_shipped=as_shipped)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert (after - before > 2**25) is as_shipped


def test_capacities_that_the_environment_names_are_left_alone(monkeypatch):
    names = onednn._CAPACITIES
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(names[0], "7")
    assert onednn.keep_few_products() == "7"
    assert [os.environ.get(name) for name in names] == ["7", "48"]
    onednn.keep_products_as_shipped()
    assert [os.environ.get(name) for name in names] == ["7", None]
