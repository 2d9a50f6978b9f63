"""What a step of an LSTM or a GRU makes of its products, with gradients: compiled (_gates.cpp) in one pass each way.

Without a compiler, and for other types and devices, torch operations serve; they are the definition.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.core import native
from attnbench.core.derivatives import once_differentiable

_SOURCE = Path(__file__).with_name("_gates.cpp")

State = tuple[Float[Tensor, "R W"], ...]
"""What a layer carries: (h,) of a GRU, (h, c) of an LSTM."""


def lstm(
    products: Float[Tensor, "R G"], cell: Float[Tensor, "R W"]
) -> tuple[Float[Tensor, "R W"], Float[Tensor, "R W"]]:
    """(hidden, cell) after a step (Hochreiter & Schmidhuber 1997, with forget gates), as torch.nn.LSTM has it.

    products: of the gates enter, keep, new and leave, of input and state together; G = 4 W. Both are one type.
    """
    if _serves(products, cell):
        return _Lstm.apply(products, cell)  # pyright: ignore[reportReturnType]
    enter, keep, new, leave = products.chunk(4, 1)
    cell = torch.addcmul(keep.sigmoid() * cell, enter.sigmoid(), new.tanh())
    return leave.sigmoid() * cell.tanh(), cell


def gru(ours: Float[Tensor, "R G"], theirs: Float[Tensor, "R G"], hidden: Float[Tensor, "R W"]) -> Float[Tensor, "R W"]:
    """The state after a step (Cho et al. 2014, the reset gate after the product), as torch.nn.GRU has it.

    ours, theirs: of the gates reset, keep and new, of the input and of the state; G = 3 W. All are one type.
    """
    if _serves(ours, theirs, hidden):
        return _Gru.apply(ours, theirs, hidden)  # pyright: ignore[reportReturnType]
    width = hidden.shape[1]
    reset, keep = (ours[:, : 2 * width] + theirs[:, : 2 * width]).sigmoid().chunk(2, 1)
    new = torch.addcmul(ours[:, 2 * width :], reset, theirs[:, 2 * width :]).tanh()
    return torch.addcmul(new, keep, hidden - new)


def _serves(*given: Tensor) -> bool:
    if any(each.device.type != "cpu" or each.dtype != torch.float32 for each in given):
        return False
    return native.readable(*given) and native.load(_SOURCE) is not None


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        products, cell = products.contiguous(), cell.contiguous()
        made, after, hidden = (torch.empty_like(each) for each in (products, cell, cell))
        _call("attnbench_lstm", cell, products, cell, made, after, hidden)
        ctx.save_for_backward(made, cell, after)
        return hidden, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        made, cell, after = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None
        found = torch.empty_like(made), torch.empty_like(cell)
        _call("attnbench_lstm_backward", cell, *map(_plain, grads), made, cell, after, *found)
        return found


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ours: Tensor, theirs: Tensor, hidden: Tensor) -> Tensor:
        given = [each.contiguous() for each in (ours, theirs, hidden)]
        made, after = torch.empty_like(given[0]), torch.empty_like(given[2])
        _call("attnbench_gru", after, *given, made, after)
        ctx.save_for_backward(made, given[1], given[2])
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        made, theirs, hidden = ctx.saved_tensors
        found = torch.empty_like(made), torch.empty_like(made), torch.empty_like(hidden)
        _call("attnbench_gru_backward", hidden, _plain(grads[0]), made, theirs, hidden, *found)
        return found


def _plain(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.resolve_neg().contiguous()


def _call(name: str, state: Float[Tensor, "R W"], *given: Tensor | None) -> None:
    sizes = map(ctypes.c_int64, state.shape)
    getattr(native.loaded(_SOURCE), name)(*map(native.at, given), *sizes, torch.get_num_threads())
