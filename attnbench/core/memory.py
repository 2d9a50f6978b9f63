"""What a GPU says when its memory is full."""

from __future__ import annotations

import torch


def is_full(error: RuntimeError) -> bool:
    """Whether it is memory that a GPU lacks; graphs lie outside of what torch counts, and it has other words there."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(
        words in str(error) for words in ("out of memory", "ALLOC_FAILED")
    )
