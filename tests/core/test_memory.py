"""What says that memory is full is known by what it says."""

from __future__ import annotations

import pytest
import torch

from attnbench.core.memory import is_full, is_passing


@pytest.mark.parametrize(("error", "full"), [
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (RuntimeError("CUDA error: out of memory"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
])  # fmt: skip
def test_a_full_memory_is_told_from_other_errors(error: RuntimeError, full: bool):
    assert is_full(error) is full


@pytest.mark.parametrize(("error", "passing"), [
    (torch.cuda.OutOfMemoryError("CUDA out of memory"), True),
    (MemoryError(), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"), True),
    (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True),
    (PermissionError(13, "Permission denied"), True),
    (OSError(5, "Input/output error"), True),
    (FileNotFoundError(2, "No such file or directory"), False),
    (OSError(22, "Invalid argument"), False),
    (EOFError(), False),
    (RuntimeError("PytorchStreamReader failed reading zip archive"), False),
])  # fmt: skip
def test_a_file_is_not_damaged_by_what_passes(error: Exception, passing: bool):
    assert is_passing(error) is passing
