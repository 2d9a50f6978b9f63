"""What says that memory is full is known by what it says."""

from __future__ import annotations

import pytest
import torch

from attnbench.core.memory import is_full


@pytest.mark.parametrize(("error", "full"), [
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (RuntimeError("CUDA error: out of memory"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
])  # fmt: skip
def test_a_full_memory_is_told_from_other_errors(error: RuntimeError, full: bool):
    assert is_full(error) is full
