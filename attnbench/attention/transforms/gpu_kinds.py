"""Transforms as Triton kernels count them (climb.py), known without Triton."""

from __future__ import annotations

from attnbench.attention.transforms.base import FusedKind

KINDS: dict[FusedKind, int] = {"softmax": 0, "topk": 0, "sparsemax": 1, "entmax15": 2, "entmax": 3}
EXCESS: dict[FusedKind, float] = {"softmax": 1.0, "topk": 1.0, "sparsemax": 1.0, "entmax15": 0.5}
"""alpha - 1 of those that have one of their own; to the others any will do."""
LEAST = 1e-5
"""The smallest alpha - 1 that is computed; below it entmax is softmax but for rounding."""
