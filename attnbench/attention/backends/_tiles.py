"""Positions in tiles with their neighbours, and the sums that lead back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn


class Cut(NamedTuple):
    """How positions are cut: so many to a tile, which sees so many more on its left and right, at most its own size."""

    size: int
    left: int = 0
    right: int = 0

    @property
    def width(self) -> int:
        return self.left + self.size + self.right


def filled(states: Shaped[Tensor, "B H N E"], size: int) -> Shaped[Tensor, "B H M E"]:
    """Zeros at the end of dimension 2, up to a whole number of tiles."""
    return nn.functional.pad(states, (0, 0, 0, -states.shape[2] % size))


def around(
    states: Shaped[Tensor, "B H N E"], cut: Cut, tokens: int = 0
) -> tuple[Shaped[Tensor, "B H T W E"], Shaped[Tensor, "B H n E"]]:
    """Each tile with its neighbours, zeros past the ends; and the first n = min(N, tokens) positions."""
    if not cut.left and not cut.right:
        return filled(states, cut.size).unflatten(2, (-1, cut.size)), states[:, :, :tokens]
    return _Around.apply(states, cut, tokens)  # pyright: ignore[reportReturnType]


class _Around(torch.autograd.Function):
    """Linear, and the transpose of `_Joined`, so that either is the other's derivative."""

    @staticmethod
    def forward(ctx: Any, states: Float[Tensor, "B H N E"], cut: Cut, tokens: int) -> tuple[Tensor, Tensor]:
        ctx.cut, ctx.length = cut, states.shape[2]
        size, left, right = cut
        whole = filled(states, size).unflatten(2, (-1, size))
        tiles = states.new_empty(*whole.shape[:3], cut.width, whole.shape[4])
        tiles[:, :, :, left : left + size] = whole
        tiles[:, :, 1:, :left] = whole[:, :, :-1, size - left :]
        tiles[:, :, :-1, left + size :] = whole[:, :, 1:, :right]
        tiles[:, :, :1, :left] = 0
        tiles[:, :, -1:, left + size :] = 0
        return tiles, states[:, :, :tokens].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Joined.apply(*grads, ctx.cut, ctx.length), None, None  # pyright: ignore[reportReturnType]


class _Joined(torch.autograd.Function):
    """What each position was given as a part of its own tile, of those beside it, and as one of the first, added up."""

    @staticmethod
    def forward(ctx: Any, tiles: Float[Tensor, "B H T W E"], first: Tensor, cut: Cut, length: int) -> Tensor:
        ctx.cut, ctx.tokens = cut, first.shape[2]
        size, left, right = cut
        joined = tiles[:, :, :, left : left + size].clone(memory_format=torch.contiguous_format)
        joined[:, :, :-1, size - left :] += tiles[:, :, 1:, :left]
        joined[:, :, 1:, :right] += tiles[:, :, :-1, left + size :]
        joined = joined.flatten(2, 3)[:, :, :length]
        joined[:, :, : ctx.tokens] += first
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_Around.apply(grads[0], ctx.cut, ctx.tokens), None, None  # pyright: ignore[reportGeneralTypeIssues]
