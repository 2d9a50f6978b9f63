"""Recurrent layers for training on a processor: what is known of the inputs of all steps is multiplied at once before
the loop, what weights' gradients are made of at once behind it, and a step between makes one product a layer, of a GRU
two.

Measured against torch's layers, in turns, two threads of AVX2, forward and backward: encoders over rows of several
lengths 1.1 to 1.5 times as fast (128 to 512 wide, 25 to 161 rows), decoders of an LSTM that are fed 1.1 to 1.9 times,
those of a GRU as fast. Of rows of one length torch's LSTM, one operation, is the faster one: 1.2 times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence

from attnbench.core import gates, hooks, native
from attnbench.core.deferred import Deferred
from attnbench.core.gates import State


def serves(layers: nn.RNNBase, inputs: Tensor) -> bool:
    """Whether such layers are made here: on a processor, with gradients, where nobody looks at what they take and
    give, nor wants what defines them (native.off)."""
    if native.is_off_here() or inputs.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if not native.readable(inputs, *layers.parameters()):
        return False
    if type(layers) not in (nn.LSTM, nn.GRU) or not layers.bias or layers.proj_size or "forward" in vars(layers):
        return False
    return not hooks.are_on(layers)


class _Cell(ABC):
    """One layer in one direction, for one loop. States are of the weights' type, under autocast, too."""

    states: ClassVar[int]
    """Numbers of a unit that are carried on."""

    def __init__(self, weights: Sequence[Tensor], early: int, bias: Float[Tensor, "G"]) -> None:
        """weights: as `all_weights` of torch's layers has them. early: inputs that are known before the loop, the first
        ones. bias: what is added once to all that the inputs have in the products."""
        self._early, self._like = (weights[0][:, :early], bias), weights[1]

    def zeros(self, rows: int) -> State:
        """What rows carry that have read nothing."""
        return (self._like.new_zeros(rows, self._like.shape[1]),) * self.states

    def ahead(self, early: Float[Tensor, "... E"]) -> Float[Tensor, "... G"]:
        """The part that early inputs have in the products of their steps."""
        return linear(early, *self._early)

    @abstractmethod
    def __call__(self, ahead: Float[Tensor, "R G"] | None, late: Float[Tensor, "R F"] | None, state: State) -> State:
        """One step. ahead: None where no input is early. late: the others; None where all are early."""


class _Lstm(_Cell):
    states = 2

    def __init__(self, weights: Sequence[Tensor], early: int) -> None:
        of_input, of_state, input_bias, state_bias = weights
        bias = input_bias + state_bias
        super().__init__(weights, early, bias)
        self._late = Deferred(torch.cat([of_input[:, early:], of_state], 1), None if early else bias)

    def __call__(self, ahead: Tensor | None, late: Tensor | None, state: State) -> State:
        hidden, cell = (each.to(self._like.dtype) for each in state)
        given = hidden if late is None else torch.cat([late.to(hidden.dtype), hidden], 1)
        return gates.lstm(self._late(given, ahead).to(cell.dtype), cell)


class _Gru(_Cell):
    states = 1

    def __init__(self, weights: Sequence[Tensor], early: int) -> None:
        of_input, of_state, input_bias, state_bias = weights
        super().__init__(weights, early, input_bias)
        self._late = Deferred(of_input[:, early:], None if early else input_bias)
        self._own = Deferred(of_state, state_bias)  # the reset gate stands between the two

    def __call__(self, ahead: Tensor | None, late: Tensor | None, state: State) -> State:
        hidden = state[0].to(self._like.dtype)
        ours = ahead if late is None else self._late(late, ahead)
        assert ours is not None  # an input is early or late
        return (gates.gru(ours.to(hidden.dtype), self._own(hidden).to(hidden.dtype), hidden),)


def _cell(layers: nn.RNNBase, place: int, early: int) -> _Cell:
    """The layer, or the direction of one, whose weights stand at `place`."""
    return (_Lstm if isinstance(layers, nn.LSTM) else _Gru)(layers.all_weights[place], early)


def read(
    layers: nn.RNNBase, packed: PackedSequence, dropout: Callable[[Tensor], Tensor]
) -> tuple[PackedSequence, tuple[Float[Tensor, "N B W"], ...]]:
    """What `layers` gives for packed rows; only where it `serves`. dropout: between layers."""
    data, sizes, last = packed.data, packed.batch_sizes.tolist(), []
    for layer in range(layers.num_layers):
        if layer:
            data = dropout(data)
        ways = []
        for direction in range(2 if layers.bidirectional else 1):
            cell = _cell(layers, len(last), data.shape[1])
            made, state = (_read_back if direction else _read)(cell, data, sizes)
            ways.append(made)
            last.append(state)
        data = torch.cat(ways, 1) if len(ways) > 1 else ways[0]
    ends = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    order = packed.unsorted_indices
    if order is not None:
        ends = tuple(each.index_select(1, order) for each in ends)
    return packed._replace(data=data), ends


def _read(cell: _Cell, data: Float[Tensor, "N I"], sizes: Sequence[int]) -> tuple[Float[Tensor, "N W"], State]:
    """Rows end one after the other, the last ones first."""
    state, states, ended = cell.zeros(sizes[0]), [], []
    for ahead in cell.ahead(data).split(sizes):
        rows, gone = len(ahead), len(state[0]) - len(ahead)
        if gone:
            parts = [each.split([rows, gone]) for each in state]
            ended.append(tuple(part[1] for part in parts))
            state = tuple(part[0] for part in parts)
        state = cell(ahead, None, state)
        states.append(state[0])
    return torch.cat(states), tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))


def _read_back(cell: _Cell, data: Float[Tensor, "N I"], sizes: Sequence[int]) -> tuple[Float[Tensor, "N W"], State]:
    """Rows begin one after the other, the first ones first."""
    state, states = cell.zeros(sizes[-1]), []
    for ahead in reversed(cell.ahead(data).split(sizes)):
        more = len(ahead) - len(state[0])
        if more:
            state = tuple(torch.cat(parts) for parts in zip(state, cell.zeros(more), strict=True))
        state = cell(ahead, None, state)
        states.append(state[0])
    return torch.cat(states[::-1]), state


class Steps:
    """The layers over one target, whose tokens are known before, while what joins each of them is not; only where it
    `serves`. early: the embedded tokens, each used by one call. dropout: between layers."""

    def __init__(self, layers: nn.RNNBase, early: Float[Tensor, "R T E"], dropout: Callable[[Tensor], Tensor]) -> None:
        self._cells = [_cell(layers, place, 0 if place else early.shape[2]) for place in range(layers.num_layers)]
        self._ahead = iter(self._cells[0].ahead(early.transpose(0, 1)).unbind())
        self._dropout = dropout

    def __call__(self, late: Float[Tensor, "R F"] | None, before: Sequence[State]) -> tuple[State, ...]:
        """The states of the layers after the next step. Raises ValueError behind the last one."""
        ahead = next(self._ahead, None)
        if ahead is None:
            raise ValueError("the target has no more tokens")
        first, *others = zip(self._cells, before, strict=True)
        after = [first[0](ahead, late, first[1])]
        for cell, state in others:
            after.append(cell(None, self._dropout(after[-1][0]), state))
        return tuple(after)
