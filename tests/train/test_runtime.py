from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.core.bfloat16 import multiplies_bfloat16
from attnbench.core.errors import MissingExtraError, SpecError
from attnbench.train.runtime import Runtime, choose_device, choose_runtime, use_no_tf32, use_threads


def test_the_processor_is_there_and_an_unknown_device_is_not():
    assert choose_device("cpu").type == "cpu"
    with pytest.raises(SpecError, match="--device gpu: no such kind"):
        choose_device("gpu")
    with pytest.raises(MissingExtraError, match=r"CUDA devices are here; use --device cpu"):
        choose_device(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize(("precision", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_computed_in_the_precision_asked_for(precision: str, kind: torch.dtype):
    runtime = Runtime(torch.device("cpu"), precision)  # pyright: ignore[reportArgumentType]
    with runtime.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is kind
    assert runtime.peak_memory_mb() is None


def test_the_peak_of_memory_is_forgotten_on_the_device_that_is_asked(monkeypatch: pytest.MonkeyPatch):
    peak = {"cuda:1": 3 * 2**20}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[str(device)])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update({str(device): 2**20}))
    runtime = Runtime(torch.device("cuda", 1))
    assert runtime.peak_memory_mb() == 3
    runtime.forget_peak()
    assert runtime.peak_memory_mb() == 1
    Runtime(torch.device("cpu")).forget_peak()
    assert peak == {"cuda:1": 2**20}


def test_a_processor_without_mkldnn_multiplies_no_bfloat16(monkeypatch: pytest.MonkeyPatch):
    here = torch.device("cpu")
    assert choose_runtime(here, "fp32").precision == "fp32"
    assert choose_runtime(here, "bf16").precision == ("bf16" if multiplies_bfloat16(here) else "fp32")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not multiplies_bfloat16(here)
    assert choose_runtime(here, "bf16").precision == "fp32"


@pytest.mark.parametrize(("machine", "half", "tiles", "known"), [
    ("x86_64", True, False, True), ("x86_64", False, True, True), ("x86_64", False, False, False),
    ("aarch64", False, False, True),
])  # fmt: skip
def test_a_processor_of_avx512_alone_multiplies_no_bfloat16(
    machine: str, half: bool, tiles: bool, known: bool, monkeypatch: pytest.MonkeyPatch
):
    """oneDNN would, at a third of its speed in float32."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: half, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)
    assert multiplies_bfloat16(torch.device("cpu")) is known


@pytest.mark.parametrize(("capability", "known"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_multiply_bfloat16_from_capability_8_on(capability: Any, known: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert multiplies_bfloat16(torch.device("cuda", 0)) is known


def test_float32_means_float32_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """By default cuDNN rounds what convolutions and recurrent layers multiply to TF32."""
    layers = [SimpleNamespace(fp32_precision="tf32") for _ in range(2)]
    monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(conv=layers[0], rnn=layers[1], allow_tf32=True))
    use_no_tf32()
    assert [each.fp32_precision for each in layers] == ["ieee", "ieee"]
    assert torch.backends.cudnn.allow_tf32  # that is the older name of the same, and both together are refused
    monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(allow_tf32=True))
    use_no_tf32()
    assert not torch.backends.cudnn.allow_tf32


def test_threads_are_at_least_one():
    before = torch.get_num_threads()
    try:
        use_threads(0)
        assert torch.get_num_threads() == 1
    finally:
        use_threads(before)


def test_a_clock_waits_for_an_apple_gpu(monkeypatch: pytest.MonkeyPatch):
    waited = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(True))
    Runtime(torch.device("mps")).synchronize()
    Runtime(torch.device("cpu")).synchronize()
    assert waited == [True]
