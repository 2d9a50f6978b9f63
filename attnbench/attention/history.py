"""What each source position has received so far: fertility spent, and how hypotheses carry it.

A decoder that runs step by step asks for all hypotheses of a source at once, as queries of one row of the batch; their
histories are rows of their own (R = B * Q, those of a source adjacent), so that beams can be reordered.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad


def fold(rows: Float[Tensor, "R H K"], batch: int) -> Float[Tensor, "B H Q K"]:
    """Rows of hypotheses as queries of their sources."""
    return rows.reshape(batch, rows.shape[0] // max(1, batch), *rows.shape[1:]).transpose(1, 2)


def unfold(queries: Float[Tensor, "B H Q K"]) -> Float[Tensor, "R H K"]:
    """The reverse of `fold`."""
    return queries.transpose(1, 2).flatten(0, 1)


def last_position(valid: Bool[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
    """True at the last valid position of each row, padded on the right."""
    return valid & ~pad(valid[:, 1:], (0, 1))


def endow(fertility: Float[Tensor, "B K"], valid: Bool[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """How much each position may receive in all: its fertility; 0 at padding; inf at the last one, the sink.

    The sink is there to take what no word may: its bound is 1 at every step, and a bound of inf is the same.
    """
    return fertility.masked_fill(~valid, 0.0).masked_fill(last_position(valid), torch.inf)


def remaining(fertility: Float[Tensor, "B K"], spent: Float[Tensor, "R #H K"]) -> Float[Tensor, "B #H Q K"]:
    """`u = max(0, f - spent)` (Malaviya et al. 2018); the gradient goes back through what was spent.

    What is left where NaN was spent is inf: the context of that step is NaN already, and a training that has diverged
    shall tell it by its loss.
    """
    batch = fertility.shape[0]
    difference = fertility[:, None, None, :].to(spent.dtype) - fold(spent, batch)
    return difference.clamp_min(0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
