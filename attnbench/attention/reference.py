"""The definition of attention that every module and every fast path is tested against.

score(q, k) -> mask by pattern and padding -> transform -> mix with v
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.patterns.base import dense
from attnbench.attention.scores.base import Score
from attnbench.attention.transforms.base import ScoreTransform
from attnbench.attention.types import MaskMod, Positions


def attend(
    query: Float[Tensor, "B H Q E"],
    keys: Float[Tensor, "B H K E"],
    values: Float[Tensor, "B H K E2"],
    *,
    score: Score,
    transform: ScoreTransform,
    positions: Positions,
    rule: MaskMod | None = None,
    kept: MaskMod | None = None,
    valid: Bool[Tensor, "B K"] | None = None,
) -> tuple[Float[Tensor, "B H Q E2"], Float[Tensor, "B H Q K"]]:
    """Context and weights of plain attention, mixed term by term so that a masked value never touches a row.

    kept: the keys that the transform attends to in any case, where it is one with a window of its own.
    A row with no key left gets context 0. Memory is B*H*Q*K*E: for tests and small inputs.
    """
    scores = score(query, keys)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if rule is not None:
        allowed = allowed & dense(rule, positions, heads=query.shape[1])
    if valid is not None:
        allowed = allowed & valid[:, None, None, :]
    if kept is None:
        weights = transform(scores, valid=allowed)
    else:
        weights = transform(scores, valid=allowed, keep=dense(kept, positions))
    terms = weights.unsqueeze(-1) * values.unsqueeze(-3)
    context = torch.where(allowed.unsqueeze(-1), terms, 0.0).sum(-2)
    return context, weights
