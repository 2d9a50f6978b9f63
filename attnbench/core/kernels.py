"""Where Triton's kernels run: compiled on a GPU, or as plain Python for tests."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


@functools.cache
def compiles(device: torch.device) -> bool:
    """Whether kernels are compiled for this GPU: one of NVIDIA's that knows bfloat16 and tf32."""
    if interpreted() or not installed() or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def installed() -> bool:
    """Whether Triton is."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run as plain Python, on any device: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
