"""Convolutions of stride 1 on a processor: one matrix product over the window of each position (im2col), also for
sentences laid end to end, without their padding.

Measured against torch's convolution, in turns, forward and backward, with gates, 2 threads of AVX2: windows of three
positions, 256 and 512 wide, in 80 rows of 26 positions 1.4 to 1.6 times as fast, 512 wide in 16 rows of 128 1.1 to 1.2
times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.core import native
from attnbench.core.derivatives import once_differentiable
from attnbench.core.ragged import Ragged

LEAST = 128
"""Positions from which it pays where nothing is trained: a weight is brought into another order at each call."""


def serves(positions: int, *given: Tensor) -> bool:
    """Whether `convolve` takes these, and pays for so many positions; it gives what torch's convolution gives, which is
    its definition (native.off)."""
    enough = torch.is_grad_enabled() or positions >= LEAST
    return enough and not native.is_off_here() and all(each.is_cpu for each in given) and native.readable(*given)


def convolve(
    inputs: Float[Tensor, "B M C"],
    weight: Float[Tensor, "N C W"],
    bias: Float[Tensor, "N"],
    outside: Int[Tensor, "X"] | None = None,
) -> Float[Tensor, "B Q N"]:
    """The convolution of each window of W positions, Q = M - W + 1, in the type of autocast; differentiable once.

    outside: what counts as zero in them; places in the windows laid end to end, of Q * W positions, where B is 1.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")  # which leaves float64 alone
        inputs, weight, bias = (
            each if each.dtype == torch.float64 else each.to(dtype) for each in (inputs, weight, bias)
        )
    return _Convolve.apply(inputs, weight, bias, outside)  # pyright: ignore[reportReturnType]


class _Convolve(torch.autograd.Function):
    """Windows and the flat weight are made again for the backward pass: kept, they would take W times the memory of the
    inputs, and the weight's once more."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, outside: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight, outside)
        with torch.autocast("cpu", enabled=False):
            windows = _windows(inputs, weight.shape[2], outside)
            return torch.addmm(bias, windows.flatten(0, 1), flat(weight).t()).unflatten(0, windows.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, outside = ctx.saved_tensors
        to_inputs = to_weight = to_bias = None
        _, width, span = weight.shape
        grad = upstream[0].flatten(0, 1)
        if ctx.needs_input_grad[0]:
            to_inputs, moved = torch.zeros_like(inputs), (grad @ flat(weight)).unflatten(0, upstream[0].shape[:2])
            if outside is not None:
                moved.view(-1, width).index_fill_(0, outside, 0.0)
            for place, part in enumerate(moved.split(width, 2)):
                to_inputs[:, place : place + part.shape[1]] += part
        if ctx.needs_input_grad[1]:
            to_weight = grad.t() @ _windows(inputs, span, outside).flatten(0, 1)
            to_weight = to_weight.unflatten(1, (span, width)).transpose(1, 2)
        if ctx.needs_input_grad[2]:
            to_bias = grad.sum(0)
        return to_inputs, to_weight, to_bias, None


def flat(weight: Float[Tensor, "N C W"]) -> Float[Tensor, "N K"]:
    """Over the numbers of all positions, one after the other."""
    return weight.transpose(1, 2).flatten(1)


def _windows(inputs: Float[Tensor, "B M C"], span: int, outside: Int[Tensor, "X"] | None) -> Float[Tensor, "B Q K"]:
    count = inputs.shape[1] - span + 1
    if count < 1:
        raise ValueError(f"a window of {span} positions does not fit into {inputs.shape[1]}")
    made = torch.cat([inputs[:, place : place + count] for place in range(span)], 2)
    if outside is not None:
        made.view(-1, inputs.shape[2]).index_fill_(0, outside, 0.0)
    return made


class Sentences(NamedTuple):
    """N tokens of a batch padded on the right, end to end, and what a window around each of them sees.

    around: positions before and after a token that its window has. outside: of the N windows laid end to end, the
    places that lie beyond the ends of their sentence.
    """

    ragged: Ragged
    around: tuple[int, int]
    outside: Int[Tensor, "X"]

    @classmethod
    def of(cls, valid: Bool[Tensor, "B S"], around: tuple[int, int]) -> Sentences | None:
        """None where nothing would be gained (Ragged.of), of a batch without tokens, and where other padding than that
        on the right divides what lies side by side here."""
        ragged = Ragged.of(valid)
        if ragged is None or not len(ragged.at):
            return None
        length = valid.shape[1]
        position, ends = ragged.at[:, None] % length, valid.sum(1)[ragged.at // length, None]
        if (position >= ends).any():
            return None
        seen = position + torch.arange(-around[0], around[1] + 1, device=position.device)
        return cls(ragged, around, ((seen < 0) | (seen >= ends)).flatten().nonzero()[:, 0])

    def take(self, padded: Float[Tensor, "B S D"]) -> Float[Tensor, "N D"]:
        """The tokens from their places."""
        return self.ragged.take(padded.unsqueeze(1))

    def pad(self, tokens: Float[Tensor, "N D"]) -> Float[Tensor, "B S D"]:
        """The tokens in their places, 0 in all others."""
        return self.ragged.pad(tokens).squeeze(1)

    def rows(self) -> Int[Tensor, "N"]:
        """The row of each token."""
        return self.ragged.at // (len(self.ragged.token) // self.ragged.rows)
