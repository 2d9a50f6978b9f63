"""Recurrent layers over padded rows, a step at a time: what torch makes of packed rows, without asking how long they
are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attnbench.core.gates import State


def read(
    layers: nn.RNNBase, inputs: Float[Tensor, "B S I"], valid: Bool[Tensor, "B S"]
) -> tuple[Float[Tensor, "B S D"], tuple[Float[Tensor, "N B W"], ...]]:
    """The states of the last layer, 0 at padding, and the last state of each layer in each direction, as `layers` gives
    them; of a row without a token it is 0."""
    directions = 2 if layers.bidirectional else 1
    mask, last = valid.unsqueeze(-1), []
    for layer in range(layers.num_layers):
        if layer and layers.training and layers.dropout:
            inputs = nn.functional.dropout(inputs, layers.dropout)
        ways = []
        for direction in range(directions):
            states, state = _read(layers, layer * directions + direction, inputs, mask, backwards=direction == 1)
            ways.append(states)
            last.append(state)
        inputs = torch.cat(ways, -1).masked_fill(~mask, 0.0)
    return inputs, tuple(torch.stack(parts) for parts in zip(*last, strict=True))


def _read(
    layers: nn.RNNBase, place: int, inputs: Float[Tensor, "B S I"], mask: Bool[Tensor, "B S 1"], *, backwards: bool
) -> tuple[Float[Tensor, "B S W"], State]:
    """One layer in one direction. place: where its weights stand."""
    weights = layers.all_weights[place]
    zeros = inputs.new_zeros(len(inputs), layers.hidden_size)
    state, step = ((zeros, zeros), _lstm) if isinstance(layers, nn.LSTM) else ((zeros,), _gru)
    steps = list(zip(inputs.unbind(1), mask.unbind(1), strict=True))
    states = []
    for given, there in reversed(steps) if backwards else steps:
        moved = step(given, state, weights)
        state = tuple(torch.where(there, new, old) for new, old in zip(moved, state, strict=True))
        states.append(state[0])
    return torch.stack(states[::-1] if backwards else states, 1), state


def _lstm(given: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    return torch.lstm_cell(given, state, *weights)


def _gru(given: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    return (torch.gru_cell(given, state[0], *weights),)
