"""What a summed negative log-likelihood says of a model: perplexity."""

from __future__ import annotations

import math


def perplexity(nats: float, tokens: int) -> float | None:
    """exp(nats / tokens), for nats summed over `tokens` real tokens (EOS in, padding out).

    None without tokens; inf where it is too large for a float. Sum over a corpus first: it is no mean of batches.
    """
    if not tokens:
        return None
    try:
        return math.exp(nats / tokens)
    except OverflowError:
        return math.inf
