"""The device and precision of a training, and what is set for the whole process."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attnbench.core import waiting
from attnbench.core.bfloat16 import multiplies_bfloat16
from attnbench.core.errors import MissingExtraError, SpecError


@dataclass(frozen=True)
class Runtime:
    """One device, and the type in which matrix products are computed."""

    device: torch.device
    precision: Literal["fp32", "bf16"] = "fp32"

    @property
    def product_type(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, self.product_type)
        return nullcontext()

    def ahead(self) -> int:
        """Updates that are begun before the numbers of the one before have come: a GPU is kept busy that way."""
        return int(self.device.type == "cuda")

    def fetch(self, values: Tensor) -> Callable[[], list[float]]:
        """Begin to bring numbers from the device. Calling what is returned waits for them, not for what came later."""
        if self.device.type != "cuda":
            return values.tolist
        here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        here.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))

        def numbers() -> list[float]:
            copied.synchronize()
            return here.tolist()

        return numbers

    def peak_memory_mb(self) -> float | None:
        """Most device memory taken since `forget_peak`, else since the process began; None on a processor."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) / 2**20

    def forget_peak(self) -> None:
        """Let `peak_memory_mb` begin again with what is taken now: a process may train one model after another."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read next is true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


_WAITS = ("synchronizing", waiting.REFUSED)
"""What is said of a call that waits for the GPU."""


def waits(run: Callable[[], object], *, watched: bool) -> bool:
    """Whether a call would wait for the GPU; it ends there. watched: torch looks for that, too (its debug mode for
    synchronisation), not only our own code that knows it cannot be recorded."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # which it tells of itself
        torch.cuda.set_sync_debug_mode("error" if watched else before)
    try:
        run()
    except RuntimeError as error:
        if not any(words in str(error) for words in _WAITS):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def choose_device(name: str | None) -> torch.device:
    """`name`, or for None and `auto` a GPU if there is one, else the processor. Raises SpecError
    for an unknown kind of device, and MissingExtraError when the device is not there."""
    if name is None or name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise SpecError(f"--device {name}: no such kind of device; use auto, cpu, cuda, cuda:N or mps")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise MissingExtraError(f"--device {name}: there is no such device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MissingExtraError(f"--device {name}: {torch.cuda.device_count()} CUDA devices are here; use --device cpu")
    return device


def use_device(device: torch.device) -> torch.device:
    """Make a GPU that is named by number the one that streams, graphs and Triton's kernels are of."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def use_no_tf32() -> None:
    """Have float32 mean float32 on a GPU, for the whole process: cuDNN's convolutions and recurrent layers would round
    what they multiply to TF32's 10 bits. Products by cuBLAS are exact by torch's own default."""
    layers: list[Any] = [getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn")]
    if all(hasattr(each, "fp32_precision") for each in layers):
        for each in layers:
            each.fp32_precision = "ieee"
    else:  # as torch before 2.9 has it
        torch.backends.cudnn.allow_tf32 = False


def choose_runtime(device: torch.device, precision: Literal["fp32", "bf16"]) -> Runtime:
    """In that precision; in float32 where the device has no instructions for the other."""
    return Runtime(device, precision if precision == "fp32" or multiplies_bfloat16(device) else "fp32")


def all_devices() -> tuple[str, ...]:
    """The GPUs that jobs share out among themselves; none on a machine without."""
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def keep_freed_memory() -> None:
    """Tell glibc to reuse large blocks instead of giving them back at each free.

    A training step frees and takes the same large tensors again; the page faults cost a fifth of the step and more.
    """
    if sys.platform == "linux" and os.confstr("CS_GNU_LIBC_VERSION"):
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: take every block from the heap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: keep the heap's top


def use_threads(count: int) -> None:
    """Of torch's operations; at least one."""
    torch.set_num_threads(max(1, count))
