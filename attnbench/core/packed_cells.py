"""One step of LSTM and GRU layers with packed weights, for searches: torch brings them into its order at every call.

Measured against torch's layers, in turns, two threads, on a processor of AVX-512, 256 and 512 wide: with one row 2.6 to
10 times as fast, with 5 rows 2.2 to 5.7 times, with 64 rows 1.1 to 1.8 times, with 320 rows 0.9 to 1.1 times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnbench.core import native

MOST = 128
"""Rows; with more of them torch's layers are as fast."""
State = tuple[Float[Tensor, "R W"], ...]
"""(h,) of a GRU, (h, c) of an LSTM."""


def serves(layers: nn.RNNBase) -> bool:
    """Whether a step of these layers can be made of packed weights."""
    if type(layers) not in (nn.LSTM, nn.GRU) or "forward" in vars(layers):  # parametrised ones are of another type
        return False
    if layers.bidirectional or layers.proj_size or not layers.batch_first or not layers.bias:
        return False
    weights = [each for of_layer in layers.all_weights for each in of_layer]
    return all(each.dtype == torch.float32 and each.is_cpu for each in weights) and native.readable(*weights)


class PackedCells:
    """What stands in for the forward pass of such layers, as long as somebody holds it."""

    def __init__(self, layers: nn.RNNBase, dtype: torch.dtype, product: Callable[[Tensor, Tensor], Any]) -> None:
        """dtype: of autocast, where it serves. product: of a weight and a bias, as packed.py makes it."""
        self.layers, self.dtype, self.holders = layers, dtype, 0
        self._product = product
        self._packed: list[list[Any]] = []  # layers that only read whole sentences never ask for it

    def __call__(self, input: Any, hx: Any = None) -> Any:
        layers = self.layers
        state = (hx,) if isinstance(hx, Tensor) else hx
        if not self._fits(input, state) or not self._ready(input):
            return type(layers).forward(layers, input, hx)
        given, after, step = input[:, 0], [], _lstm if isinstance(layers, nn.LSTM) else _gru
        for place, products in enumerate(self._packed):
            moved = step(given, tuple(each[place] for each in state), products)
            after.append(moved)
            given = moved[0]
        made = tuple(torch.stack(parts) for parts in zip(*after, strict=True))
        return given[:, None], made[0] if isinstance(hx, Tensor) else made

    def _ready(self, input: Tensor) -> bool:
        """Whether the packed weights, which are made now if need be, multiply this."""
        if not self._packed:
            self._packed = [self._pack(*of_layer) for of_layer in self.layers.all_weights]
        return self._packed[0][0].takes(input)

    def _pack(self, of_input: Tensor, of_state: Tensor, input_bias: Tensor, state_bias: Tensor) -> list[Any]:
        weights = [each.detach() for each in (of_input, of_state)]
        biases = [each.detach() for each in (input_bias, state_bias)]
        if isinstance(self.layers, nn.LSTM):
            return [self._product(torch.cat(weights, 1), biases[0] + biases[1])]
        return [self._product(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def _fits(self, input: Any, state: Any) -> bool:
        """One token a row, and nothing that torch would refuse."""
        layers = self.layers
        if torch.is_grad_enabled() or not isinstance(input, Tensor) or not isinstance(state, tuple) or input.dim() != 3:
            return False
        rows, length, width = input.shape
        if length != 1 or not 0 < rows <= MOST or width != layers.input_size or (layers.training and layers.dropout):
            return False
        wanted = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        given = (input, *state)
        if wanted != self.dtype or any(not each.is_cpu or each.dtype != torch.float32 for each in given):
            return False
        shape = layers.num_layers, rows, layers.hidden_size
        parts = 2 if isinstance(layers, nn.LSTM) else 1
        return len(state) == parts and all(each.shape == shape for each in state) and native.readable(*given)


def _lstm(given: Float[Tensor, "R I"], state: State, products: list[Any]) -> State:
    """Hochreiter & Schmidhuber 1997 with forget gates, as torch.nn.LSTM has it."""
    (product,), (hidden, cell) = products, state
    gates = product(torch.cat([given, hidden], 1)).float()
    enter, keep, new, leave = gates.chunk(4, 1)
    cell = torch.addcmul(keep.sigmoid() * cell, enter.sigmoid(), new.tanh())
    return leave.sigmoid() * cell.tanh(), cell


def _gru(given: Float[Tensor, "R I"], state: State, products: list[Any]) -> State:
    """Cho et al. 2014, the reset gate after the product, as torch.nn.GRU has it."""
    (hidden,) = state
    ours, theirs = (product(each).float() for product, each in zip(products, (given, hidden), strict=True))
    width = hidden.shape[1]
    reset, keep = (ours[:, : 2 * width] + theirs[:, : 2 * width]).sigmoid_().chunk(2, 1)
    new = torch.addcmul(ours[:, 2 * width :], reset, theirs[:, 2 * width :]).tanh_()
    return (torch.lerp(new, hidden, keep),)
