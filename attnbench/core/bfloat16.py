"""Where products in bfloat16 are fast."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for products in bfloat16 that torch uses: on x86 those of AVX512-BF16 or AMX,
    on a GPU of NVIDIA those of compute capability 8, and on a processor nothing without oneDNN.

    oneDNN makes them of others where there is AVX-512 alone, at a third of its speed in float32 (measured with
    ONEDNN_MAX_CPU_ISA=AVX512_CORE); on a processor of AVX2 training took 38 times as long in bfloat16 as in float32.
    """
    if device.type == "cpu":
        return torch.backends.mkldnn.is_available() and _asked("_is_mkldnn_bf16_supported", torch.ops.mkldnn) and (
            platform.machine().lower() not in ("x86_64", "amd64", "i686")
            or _asked("_is_avx512_bf16_supported", torch.cpu)
            or _asked("_is_amx_tile_supported", torch.cpu)
        )  # fmt: skip
    if device.type == "cuda" and torch.version.hip is None:
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return True


def _asked(question: str, of: object) -> bool:
    """What torch says; a version that cannot say it lets products be tried."""
    known: Callable[[], bool] | None = getattr(of, question, None)
    return known is None or known()
