"""Softmax over all keys by torch's own fused attention (`scaled_dot_product_attention`), which writes no scores."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


def attend(
    query: Float[Tensor, "B H Q E"],
    keys: Float[Tensor, "B H K E"],
    values: Float[Tensor, "B H K E2"],
    *,
    scale: float,
    valid: Bool[Tensor, "B K"] | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "B H Q E2"]:
    """Context of every query, in the type of the values; 0 where a query has no key. Masked keys must be finite.

    causal: query i stands at the place K - Q + i of the keys. dropout: on the weights.
    """
    rows, length = query.shape[2], keys.shape[2]
    wide = functools.reduce(torch.promote_types, (each.dtype for each in (query, keys, values)))
    states = [each.to(wide) for each in (query, keys, values)]
    square = causal and valid is None and rows == length
    allowed = None if valid is None else valid[:, None, None, :]
    if causal and rows > 1 and not square:
        seen = torch.ones(rows, length, dtype=torch.bool, device=query.device).tril(length - rows)
        allowed = seen if allowed is None else seen & allowed
    mix = functools.partial(
        nn.functional.scaled_dot_product_attention, *states, dropout_p=dropout, is_causal=square, scale=scale
    )
    with torch.autocast(query.device.type, enabled=False):
        if allowed is None:
            return mix().to(values.dtype)
        alone = ~allowed.any(-1, keepdim=True)  # a softmax of nothing would be NaN, and so would its gradients
        return mix(attn_mask=allowed | alone).masked_fill(alone, 0.0).to(values.dtype)
