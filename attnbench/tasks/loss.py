"""Label-smoothed cross-entropy whose gradient is made in the forward pass, some rows at a time: of logits, or of hidden
states, whose logits are then never all there at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnbench.core import native
from attnbench.core.derivatives import once_differentiable

_SOURCE = Path(__file__).with_name("_loss.cpp")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
BLOCK = 1 << 19  # elements of a block of float32 logits: 2 MiB, so that its passes stay in the processor's cache
IGNORED = -100
"""The target of a row that does not count; torch's own number."""
LOGITS = 1 << 23
"""Logits that are held at once: 32 MiB in float32. At 3,600 rows of 10,000 it takes 0 to 2% longer than all at once."""


@runtime_checkable
class Output(Protocol):
    """What makes logits of hidden states: a model."""

    target_vocab: int

    def logits(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class _SmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        loss, nll, gradient = _with_gradient(logits.detach(), target, smoothing, logits.requires_grad)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[0].to(gradient.dtype) if gradient is not None else None), None, None


def _with_gradient(
    logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], smoothing: float, needed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """loss, nll, and the gradient of the loss where it is needed."""
    if _serves(logits, target):
        return _compiled(logits, target, smoothing, needed)
    rows, vocab = logits.shape
    gradient = torch.empty_like(logits) if needed else None
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    loss, nll = logits.new_zeros((), dtype=wide), logits.new_zeros((), dtype=wide)
    size = max(1, BLOCK // max(1, vocab)) if logits.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, size):
        block, wanted = logits[start : start + size], target[start : start + size, None].long()
        ignored = wanted == IGNORED
        wanted = wanted.masked_fill(ignored, 0)
        log_p = torch.log_softmax(block.to(wide), dim=-1)
        block_nll = -log_p.gather(1, wanted).masked_fill_(ignored, 0.0).sum()
        nll += block_nll
        loss += (1 - smoothing) * block_nll
        if smoothing:  # or 0 times a word that is ruled out would be NaN
            loss -= (smoothing / vocab) * log_p.sum(1, keepdim=True).masked_fill_(ignored, 0.0).sum()
        if gradient is not None:
            p = log_p.exp_().sub_(smoothing / vocab)
            p.scatter_add_(1, wanted, torch.full_like(wanted, smoothing - 1, dtype=wide))
            gradient[start : start + size] = p.masked_fill_(ignored, 0.0)
    return loss, nll, gradient


def _serves(logits: Tensor, target: Tensor) -> bool:
    """Whether the compiled path takes these; what does not fit is left to torch, which says so."""
    if target.dtype != torch.int64 or target.shape != logits.shape[:1]:
        return False
    if logits.device.type != "cpu" or logits.dtype not in _NAMES or logits.numel() == 0:
        return False
    return native.readable(logits, target) and native.load(_SOURCE) is not None


def _compiled(
    logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], smoothing: float, needed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same in one pass (_loss.cpp)."""
    library: Any = native.load(_SOURCE)
    logits, target = logits.contiguous(), target.contiguous()
    gradient = torch.empty_like(logits) if needed else None
    found = torch.empty(2, len(logits), dtype=torch.float32, device="cpu")
    strange = getattr(library, f"attnbench_smoothed_{_NAMES[logits.dtype]}")(
        native.at(logits), native.at(target), ctypes.c_int64(len(logits)), ctypes.c_int64(logits.shape[1]),
        ctypes.c_float(smoothing), native.at(gradient), native.at(found[0]), native.at(found[1]),
        torch.get_num_threads(),
    )  # fmt: skip
    if strange:
        raise IndexError(f"{strange} targets are none of the {logits.shape[1]} words")
    return found[0].sum(), found[1].sum(), gradient


def smoothed_cross_entropy(
    logits: Float[Tensor, "N V"], target: Int[Tensor, "N"], smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """(loss, nll), both summed over rows whose target is not IGNORED, in nats; nll is the unsmoothed part, detached.

    `loss = sum_n (1 - e) (-log p_n(y_n)) + e/V sum_v (-log p_n(v))`, e the smoothing (Szegedy et al. 2016, section 7).
    """
    return _SmoothedCrossEntropy.apply(logits, target, smoothing)  # pyright: ignore[reportReturnType]


class _OutputLoss(torch.autograd.Function):
    """Parts of the rows, one after the other; of each nothing is kept but its gradients."""

    @staticmethod
    def forward(
        ctx: Any, logits_of: Callable[[Tensor], Tensor], hidden: Tensor, target: Tensor, smoothing: float, rows: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        slope, totals = torch.empty_like(hidden), []
        slopes: list[Tensor | None] = [None] * len(parameters)
        wanted = [place for place, each in enumerate(parameters) if each.requires_grad]
        for start in range(0, len(hidden), rows):
            part = hidden[start : start + rows].detach().requires_grad_()
            with torch.enable_grad():
                logits = logits_of(part)
            loss, nll, gradient = _with_gradient(logits.detach(), target[start : start + rows], smoothing, True)
            first, *others = torch.autograd.grad(
                logits, [part, *(parameters[place] for place in wanted)], gradient, allow_unused=True
            )
            del logits, gradient  # or they would be there beside those of the next part
            slope[start : start + rows] = first
            for place, other in zip(wanted, others, strict=True):
                if other is not None:
                    sum_ = slopes[place]
                    slopes[place] = other if sum_ is None else sum_ + other  # `other` may be that of two parameters
            totals.append(torch.stack([loss, nll]))
        ctx.save_for_backward(slope, *slopes)
        loss, nll = torch.stack(totals).sum(0)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slope, *slopes = (None if each is None else each * upstream[0].to(each.dtype) for each in ctx.saved_tensors)
        return None, slope, None, None, None, *slopes


def output_loss(
    model: Output, hidden: Float[Tensor, "N D"], target: Int[Tensor, "N"], smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """smoothed_cross_entropy of `model.logits(hidden)`, which are never all held where they are more than LOGITS.

    Gradient hooks on the parameters of the output would run for each part.
    """

    def part_loss(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        return smoothed_cross_entropy(model.logits(part), wanted, smoothing)

    rows = max(1, LOGITS // model.target_vocab)
    if len(hidden) <= rows:
        return part_loss(hidden, target)
    if torch.is_grad_enabled():
        return _OutputLoss.apply(model.logits, hidden, target, smoothing, rows, *model.parameters())  # pyright: ignore[reportReturnType]
    parts = [part_loss(*each) for each in zip(hidden.split(rows), target.split(rows), strict=True)]
    return torch.stack([loss for loss, _ in parts]).sum(), torch.stack([nll for _, nll in parts]).sum()
