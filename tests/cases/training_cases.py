"""A small batch, and the attention of small models that are trained on it."""

from __future__ import annotations

from typing import Any

import torch

from attnbench.data.base import Batch

WORDS = 50


def a_batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(5, WORDS, (4, 12), generator=draw)
    source_valid = torch.arange(12) < torch.tensor([12, 4, 6, 9])[:, None]
    target_valid = torch.arange(12) < torch.tensor([3, 9, 12, 7])[:, None]
    return Batch(words, source_valid, words, words, target_valid, torch.arange(4))


DENSE_CROSS = {"cross": {"transform": "softmax", "pattern": "full"}}
ATTENTION: dict[str, Any] = {
    "softmax": {},
    "top-k": {"default": {"transform": "topk", "budget": 4}},
    "top-k out of window": {"default": {"transform": "topk_oow", "budget": 4}, **DENSE_CROSS},
    **{
        name: {"default": {"pattern": name, "budget": 4}, **DENSE_CROSS}
        for name in ("window", "dilated", "block", "global")  # those that draw ask for their draw
    },
    "fixed memory": {"cross": {"module": {"kind": "fixed_memory", "slots": 4}}},
}
