"""The likeliest next tokens of each row, in an order that depends on the row alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def top_tokens(
    logits: Float[Tensor, "R V"], count: int, banned: Sequence[int] = ()
) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]]:
    """Log-probabilities and ids of the best C = min(count, V) tokens of each row, best first.

    Equal ones stand in the order of their ids. The log-softmax runs over all V in float32 (float64 for float64);
    banned tokens keep their part of the mass, come last and have -inf; so has a row that is not all numbers.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    vocabulary = logits.shape[-1]
    count = min(count, vocabulary)
    wanted = count + len(banned)  # enough, though the best be banned ones
    values, ids = _largest(logits, wanted) if wanted < vocabulary else _all(logits)
    for token in banned:
        values = values.masked_fill(ids == token, -torch.inf)
    log_probs = values - logits.logsumexp(-1, keepdim=True)
    log_probs = torch.where(log_probs.isnan(), -torch.inf, log_probs)
    log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
    return log_probs[:, :count], ids.gather(-1, order[:, :count])


def _all(logits: Float[Tensor, "R V"]) -> tuple[Float[Tensor, "R V"], Int[Tensor, "R V"]]:
    return logits, torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)


def _largest(logits: Float[Tensor, "R V"], wanted: int) -> tuple[Float[Tensor, "R W"], Int[Tensor, "R W"]]:
    """The `wanted` largest of each row and their ids, in the order of ids; among equals the lowest ids.

    topk alone leaves open which of several equals it takes.
    """
    values, ids = logits.topk(wanted + 1, dim=-1)
    edge = values[:, -1]
    torn = (values[:, -2] == edge) & (edge > -torch.inf)  # equals on both sides of the cut
    values, ids = values[:, :-1], ids[:, :-1]
    if bool(torn.any()):
        rows = torn.nonzero().squeeze(1)
        sorted_values, sorted_ids = logits[rows].sort(dim=-1, descending=True, stable=True)
        values, ids = (
            values.index_copy(0, rows, sorted_values[:, :wanted]),
            ids.index_copy(0, rows, sorted_ids[:, :wanted]),
        )
    ids, order = ids.sort(dim=-1)
    return values.gather(-1, order), ids
