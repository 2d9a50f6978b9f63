"""What is said when memory is full, and what else is no fault of a file that is being read."""

from __future__ import annotations

import errno

import torch

_PASSING = (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE)


def is_full(error: RuntimeError) -> bool:
    """Whether it is memory that a GPU lacks; graphs lie outside of what torch counts, and it has other words there."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED")
    )


def is_passing(error: Exception) -> bool:
    """Whether a file may be sound although it could not be read: memory is full, its disk or a GPU does not answer."""
    if isinstance(error, OSError):
        return error.errno in _PASSING
    said = ("allocate memory", "CUDA error")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and (is_full(error) or any(words in str(error) for words in said))
    )
