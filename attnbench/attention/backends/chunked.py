"""Dense attention a few queries at a time: what backward needs of a chunk is computed again there, and not kept.

For mechanisms that must see the score of every key (top-k, also out of a window) on inputs whose scores would fill
the memory. The same operations on the same numbers, so the result is that of one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnbench.attention.types import Positions
from attnbench.core import waiting
from attnbench.core.carried import carried

LIMIT = 1 << 26
"""Scores of one layer (batch, heads, queries, keys) that are kept for backward: 268 MB in float32."""

Answer = Callable[[Float[Tensor, "B H q E"], Positions], Float[Tensor, "B H q E2"]]
"""The context of some of the queries."""


def attend(
    query: Float[Tensor, "B H Q E"], positions: Positions, answer: Answer, *, draws: bool
) -> Float[Tensor, "B H Q E2"]:
    """The context of every query, in chunks of a quarter of LIMIT scores. draws: whether an answer draws random
    numbers, which are then drawn again in backward; a record of an update cannot do that."""
    if draws:
        waiting.refuse()
    rows, heads = query.shape[:2]
    chunk = max(1, LIMIT // (4 * max(1, rows * heads * len(positions.k))))
    again = functools.partial(checkpoint, carried(answer), use_reentrant=False, preserve_rng_state=draws)
    parts: list[Tensor] = []
    for some, at in zip(query.split(chunk, 2), positions.q.split(chunk), strict=True):
        where = Positions(at, positions.k)
        part = again(some, where) if torch.is_grad_enabled() else answer(some, where)
        assert isinstance(part, Tensor)
        parts.append(part)
    return torch.cat(parts, 2)


def needed(query: Float[Tensor, "B H Q E"], positions: Positions) -> bool:
    """Whether the scores of all queries are more than LIMIT."""
    return query.shape[:3].numel() * len(positions.k) > LIMIT and query.shape[2] > 1
