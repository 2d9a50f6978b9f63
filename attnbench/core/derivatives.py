"""Backward passes that cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the `backward` of a torch.autograd.Function that is not linear: RuntimeError where a second derivative is
    prepared (`create_graph=True`).

    torch's decorator of this name says nothing where the gradient that arrives is a constant, as that of a loss is, or
    where only some inputs are asked about: the second derivative then lacks a part.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            name = type(ctx).__name__.removesuffix("Backward").strip("_")
            raise RuntimeError(f"{name} has no second derivative here; leave create_graph=True out")
        return backward(ctx, *grads)

    return once
