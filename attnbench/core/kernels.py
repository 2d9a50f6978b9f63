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


def whole_rows(keys: int, elements: int, a_warp: int) -> dict[str, int]:
    """Sizes of a program that holds whole rows of so many keys: `elements` of them at least, a warp for so many."""
    block = max(16, 1 << (keys - 1).bit_length())
    rows = max(1, elements // block)
    sizes = {"ROWS": rows, "BLOCK": block}
    return sizes if interpreted() else {**sizes, "num_warps": max(4, min(16, rows * block // a_warp))}


def programs(rows: int, sizes: dict[str, int]) -> tuple[int]:
    """How many such programs so many rows take."""
    return (-(-rows // sizes["ROWS"]),)
