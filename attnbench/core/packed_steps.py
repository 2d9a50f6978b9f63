"""One step of recurrent layers and of convolutions with packed weights, for searches: torch brings theirs into its own
order at every call.

Measured against torch, in turns, two threads, on a processor of AVX-512, 256 and 512 wide. LSTM: with one row 1.8 and
5.8 times as fast, with 5 rows 1.6 and 3.8, with 64 rows 0.9 and 1.4, with 128 rows 0.8 and 1.2 times. GRU: 1.6 and 2.3,
1.6 and 1.8, 1.2 and 1.2, 1.1 and 1.1 times. Convolutions of three positions: 2.4 to 3.9 times with 1 to 320 rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnbench.core import gates, native
from attnbench.core.gates import State
from attnbench.core.inherit import is_outdated

MOST = 64
"""Rows of recurrent layers; with more of them torch's are about as fast."""
Pack = Callable[[Tensor, Tensor], Any]
"""Of a weight and a bias makes what multiplies, as packed.py has it."""


class Window(nn.Module, ABC):
    """A convolution that moves by one position: of as many as it sees at once it makes one, by one product."""

    span: tuple[int, int]
    """Positions that it sees, and numbers of each."""

    @abstractmethod
    def flat(self) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N"]]:
        """Its weight over the numbers of all positions, one after the other, K in all, and its bias."""

    @abstractmethod
    def finish(self, product: Float[Tensor, "R 1 N"]) -> Tensor:
        """What `forward` gives, of the product."""


def stand_in(layer: nn.Module, dtype: torch.dtype, pack: Pack) -> PackedSteps | None:
    """What takes the place of a layer's forward pass; None where its steps are not made of packed weights. dtype: of
    autocast, where it serves."""
    if "forward" in vars(layer) or not _are_plain(layer.parameters()):
        return None
    if isinstance(layer, Window):  # whose finish is not that of a more special forward
        return None if is_outdated(type(layer), "finish", "forward") else PackedWindow(layer, dtype, pack)
    if not isinstance(layer, nn.RNNBase) or type(layer) not in (nn.LSTM, nn.GRU):  # parametrised ones are of another
        return None
    if layer.bidirectional or layer.proj_size or not layer.batch_first or not layer.bias:
        return None
    return _PackedCells(layer, dtype, pack)


def _are_plain(weights: Iterable[Tensor]) -> bool:
    given = list(weights)
    return all(each.dtype == torch.float32 and each.is_cpu for each in given) and native.readable(*given)


class PackedSteps(ABC):
    """holders: blocks that want it there."""

    def __init__(self, layer: Any, dtype: torch.dtype, pack: Pack) -> None:
        self.layer, self.dtype, self.holders = layer, dtype, 0
        self._pack, self._weights = pack, list(layer.parameters())
        self._packed: list[Any] = []  # made when a search begins to step: layers that never do are not copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": []}  # the library's cannot be copied

    def __call__(self, *given: Any, **named: Any) -> Any:
        if named or torch.is_grad_enabled() or not self._is_step(*given) or not self._ready(given[0]):
            return type(self.layer).forward(self.layer, *given, **named)
        return self._step(*given)

    def _ready(self, states: Tensor) -> bool:
        """Whether the packed weights, which are made now if need be, multiply this; others may stand in the layer for a
        call (torch.func.functional_call)."""
        return self._made() and self._packed[0].takes(states)

    def _made(self) -> bool:
        now = list(self.layer.parameters())
        if len(now) != len(self._weights) or any(
            one is not other for one, other in zip(now, self._weights, strict=True)
        ):
            return False
        if not self._packed:
            self._packed = self._products()
        return True

    def _reads(self, *given: Tensor) -> bool:
        wanted = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        if wanted != self.dtype or any(not each.is_cpu or each.dtype != torch.float32 for each in given):
            return False
        return native.readable(*given)

    @abstractmethod
    def _products(self) -> list[Any]: ...

    @abstractmethod
    def _is_step(self, *given: Any) -> bool:
        """Whether these are one step, and nothing that torch would refuse."""

    @abstractmethod
    def _step(self, *given: Any) -> Any: ...


class PackedWindow(PackedSteps):
    """A convolution over what one step sees, as one product."""

    def product(self) -> Any:
        """What multiplies the numbers that it sees at once; None where other weights stand in the layer."""
        return self._packed[0] if self._made() else None

    def _products(self) -> list[Any]:
        return [self._pack(*(each.detach() for each in self.layer.flat()))]

    def _is_step(self, *given: Any) -> bool:
        if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dim() != 3:
            return False
        if any(each.training for each in self.layer.modules()):  # what drops, for one
            return False
        (states,) = given
        return len(states) > 0 and states.shape[1:] == self.layer.span and self._reads(states)

    def _step(self, *given: Any) -> Any:
        return self.layer.finish(self._packed[0](given[0].flatten(1)).float()[:, None])


class _PackedCells(PackedSteps):
    def _products(self) -> list[Any]:
        """Of an LSTM one a layer, of a GRU two: its reset gate stands between them."""
        made: list[Any] = []
        for of_layer in self.layer.all_weights:
            of_input, of_state, input_bias, state_bias = (each.detach() for each in of_layer)
            if isinstance(self.layer, nn.LSTM):
                made.append(self._pack(torch.cat([of_input, of_state], 1), input_bias + state_bias))
            else:
                made += [self._pack(of_input, input_bias), self._pack(of_state, state_bias)]
        return made

    def _is_step(self, *given: Any) -> bool:
        layers = self.layer
        if len(given) != 2 or not isinstance(given[0], Tensor) or given[0].dim() != 3:
            return False
        states, before = given[0], _parts(given[1])
        rows, length, width = states.shape
        if length != 1 or not 0 < rows <= MOST or width != layers.input_size or (layers.training and layers.dropout):
            return False
        if len(before) != 2 if isinstance(layers, nn.LSTM) else not isinstance(given[1], Tensor):
            return False
        shape = layers.num_layers, rows, layers.hidden_size
        return all(each.shape == shape for each in before) and self._reads(states, *before)

    def _step(self, *given: Any) -> Any:
        states, before, after = given[0][:, 0], _parts(given[1]), []
        step, of_layer = (_lstm, 1) if isinstance(self.layer, nn.LSTM) else (_gru, 2)
        for place in range(self.layer.num_layers):
            products = self._packed[place * of_layer : (place + 1) * of_layer]
            after.append(step(states, tuple(each[place] for each in before), products))
            states = after[-1][0]
        made = [torch.stack(parts) for parts in zip(*after, strict=True)]
        return states[:, None], tuple(made) if isinstance(self.layer, nn.LSTM) else made[0]


def _parts(state: Any) -> tuple[Tensor, ...]:
    """(h,) or (h, c) of all layers; empty where there is none."""
    parts = state if isinstance(state, tuple) else (state,)
    return parts if all(isinstance(each, Tensor) for each in parts) else ()


def _lstm(given: Float[Tensor, "R I"], state: State, products: list[Any]) -> State:
    (product,), (hidden, cell) = products, state
    return gates.lstm(product(torch.cat([given, hidden], 1)).float(), cell)


def _gru(given: Float[Tensor, "R I"], state: State, products: list[Any]) -> State:
    (hidden,) = state
    ours, theirs = (product(each).float() for product, each in zip(products, (given, hidden), strict=True))
    return (gates.gru(ours, theirs, hidden),)
