"""What a training and its speed depend on in the machine: devices, threads, instructions, and what multiplies there."""

from __future__ import annotations

from typing import Any

import torch

from attnbench.core import native, packed, processor
from attnbench.train.onednn import onednn_in_use
from attnbench.train.recorded import records
from attnbench.train.runtime import Runtime


def facts(runtime: Runtime) -> dict[str, Any]:
    """Plain values, as they are once the process is set up."""
    device = runtime.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": processor.name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "precision": runtime.precision,
        "products": "oneDNN" if onednn_in_use() else "default",
        "searches": packed.chosen(runtime.product_type)[0] if device.type == "cpu" else None,
        "searches_int8": packed.chosen(torch.int8)[0] if device.type == "cpu" else None,
        "compiled": native.engine(),
        "updates": "recorded" if records(runtime) else None,
        "tf32": "off" if device.type == "cuda" else None,
    }
