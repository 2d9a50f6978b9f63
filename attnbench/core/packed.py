"""Linear layers whose weights are packed for products, and rounded to 8 bits where that is wanted: for searches, which
use each weight many times. Recurrent layers and convolutions are packed for their steps (packed_steps.py).

Measured against the plain layers, in turns, two threads. By torch's library on a processor of AVX-512, with 64 rows:
1.2 to 1.6 times as fast in float32, 1.4 to 2.0 times in bfloat16; with one row 1.6 to 2.8 and 1.6 to 3.2 times. By code
compiled here on one of AVX2, in float32, beside that library: with 64 rows 1.2 to 1.9 times, with one row 2 times; on
one of AVX512-BF16, in bfloat16: with 64 rows 1.0 to 1.6 times, with 320 rows 0.9 times, with one row 1.6 times. In 8
bits on one of AVX2, beside float32 by code compiled here, 512 wide or more: with 64 rows 1.2 to 1.35 times, with one
row 1.3 to 2.8 times.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from attnbench.core import measured, native, packed_steps, products, quantization
from attnbench.core.packed_steps import PackedSteps, PackedWindow

Quantization = Literal["int8"]
"""Whole numbers that operands of products are rounded to: core/quantization.py."""

_ROWS = 64
"""Rows that the layout is chosen for; others are as right, and hardly slower."""
_CLEARLY = 0.9
"""Below this part of the library's speed, with _ROWS rows, code compiled here is not used; with fewer rows it gains
more."""
_ERRORS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.int8: 1e-6}
"""How far a product of rounded operands may lie from its exact value, as a part of it."""
_FILES = {torch.float32: "packed", torch.bfloat16: "packed-bfloat16"}
"""Where it is kept what is faster."""
_TURNS = 20
"""Times that each way is timed."""
_WEIGHTS = 24
"""Weights whose products are timed together: in a search, too, each lies far from the processor until it is wanted."""


@contextmanager
def packed(model: nn.Module, quantized: Quantization | None = None) -> Iterator[None]:
    """In the block, what the model's linear layers, and steps of recurrent ones and of convolutions, compute without
    gradients comes from copies of their weights.

    quantized: linear layers of float32 multiply whole numbers of 8 bits, as quantization.py defines it, on every
    device; what they give is float32, under autocast too; a module that says `exact = True` keeps its layers as they
    are. Else products of the type of autocast at the beginning, on a processor; other calls, and those on other
    devices, go through the layers as they are.

    The weights must not change meanwhile. Blocks within blocks, and those of other threads, add nothing, and what is
    packed stays until the last of them ends; where the one is quantized and the other is not, ValueError. A model is
    not copied, pickled or moved in such a block.
    """
    layers = pack(model, quantized)
    try:
        yield
    finally:
        _unpack(layers)


def pack(model: nn.Module, quantized: Quantization | None = None) -> list[nn.Module]:
    """The same for as long as the model lives; returns the layers that are packed, none where one cannot be."""
    dtype = torch.int8 if quantized == "int8" else _wanted_type("cpu")
    exact = {
        each for owner in model.modules() if quantized and getattr(owner, "exact", False) for each in owner.modules()
    }
    held: list[nn.Module] = []
    # which may be measured, or compiled: others do not wait for it
    here = any(each.device.type == "cpu" for each in model.parameters())
    steps = here and any(isinstance(each, (nn.RNNBase, packed_steps.Window)) for each in model.modules())
    way, of_steps = _way(dtype) if here else None, _way(_wanted_type("cpu")) if steps else None
    with _changing:
        for each in model.modules():
            before = _packed_in(each)
            if isinstance(before, _Packed) and (before.dtype == torch.int8) != (dtype == torch.int8):
                raise ValueError(f"the model's weights are packed as {before.dtype} already, and {dtype} is asked for")
        try:
            for layer in model.modules():
                if layer in exact:
                    continue
                before = _packed_in(layer)
                if before is None and isinstance(layer, nn.Linear) and _serves(layer, quantized):
                    by = way if layer.weight.device.type == "cpu" else _Defined
                    before = None if by is None else _Packed(layer, dtype, by)
                elif before is None and of_steps is not None:
                    before = _steps(layer, of_steps)
                if before is not None:
                    before.holders += 1
                    layer.forward = before
                    held.append(layer)
        except BaseException:
            _let_go(held)
            raise
    return held


_changing = threading.RLock()
"""Of layers that are packed, or no longer."""


def _packed_in(layer: nn.Module) -> _Packed | PackedSteps | None:
    found = vars(layer).get("forward")
    return found if isinstance(found, (_Packed, PackedSteps)) else None


def _steps(layer: nn.Module, way: type[_Way]) -> PackedSteps | None:
    """Never quantized."""
    dtype = _wanted_type("cpu")
    return packed_steps.stand_in(layer, dtype, functools.partial(way, dtype=dtype))


def _unpack(layers: Sequence[nn.Module]) -> None:
    with _changing:
        _let_go(layers)


def _let_go(layers: Sequence[nn.Module]) -> None:
    for layer in layers:
        found = _packed_in(layer)
        if found is not None:
            found.holders -= 1
            if not found.holders:
                del layer.forward


def chosen(dtype: torch.dtype) -> tuple[str, float | None]:
    """What packs weights of that type on this machine, and how many times as fast code compiled here is as the library,
    with a step of 64 rows; None where that is not known."""
    way = _way(dtype)
    both = _own_packs(dtype) and _library_packs(dtype)
    return "nothing" if way is None else way.name, _own_gain(dtype, torch.get_num_threads()) if both else None


class Compiled(NamedTuple):
    """A layer, or a convolution over all that it sees at once, as code compiled here multiplies by it."""

    weight: products.PackedWeight
    bias: Float[Tensor, "N"] | None


def compiled(layer: nn.Module) -> Compiled | None:
    """What a packed linear layer or convolution multiplies by; None where it is not packed, or not by code compiled
    here, and where other weights stand in a convolution. A convolution's are packed now, if they are not yet."""
    held = _packed_in(layer)
    if isinstance(held, _Packed):
        product: Any = held.product
    else:
        product = held.product() if isinstance(held, PackedWindow) else None
    return Compiled(product.weight, product.bias) if isinstance(product, _Own) else None


def serves(dtype: torch.dtype) -> bool:
    """Whether weights of that type, packed by code compiled here, are what is multiplied by now: autocast may want
    another type, or the code be switched off."""
    return dtype in (torch.int8, _wanted_type("cpu")) and products.knows(dtype)


class _Packed:
    """What stands in for a layer's forward, as long as somebody holds it."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, way: type[_Way]) -> None:
        self.layer, self.dtype, self.holders = layer, dtype, 0
        self.product = way(layer.weight.detach(), None if layer.bias is None else layer.bias.detach(), dtype)

    def __call__(self, input: Tensor) -> Tensor:
        layer = self.layer
        if torch.is_grad_enabled() or not self._fits(input):
            return linear(input, layer.weight, layer.bias)
        if self.product.takes(input):
            return self.product(input)
        if self.dtype == torch.int8:
            return quantization.multiply(input, quantization.quantize(layer.weight), layer.bias)
        return linear(input, layer.weight, layer.bias)

    def _fits(self, input: Tensor) -> bool:
        """What does not is left to torch, which says so."""
        if not input.numel() or input.device != self.layer.weight.device:
            return False
        wanted = _wanted_type(input.device.type)
        if self.dtype not in (torch.int8, wanted) or input.dtype not in (torch.float32, wanted):
            return False
        return input.shape[-1:] == (self.layer.in_features,)


class _Way(Protocol):
    name: ClassVar[str]

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Both of float32. dtype: what is multiplied."""

    def takes(self, states: Tensor) -> bool: ...

    def __call__(self, states: Tensor) -> Tensor:
        """states: of float32, or of autocast's type."""
        ...


class _Library:
    """By torch's matrix library, in its own order; the product is of the type that is multiplied."""

    name: ClassVar[str] = "the matrix library"

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weight: Any = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), _ROWS)
        # torch reads a bias as if it were contiguous, and says nothing
        self.bias = None if bias is None else bias.to(dtype).contiguous()

    def takes(self, states: Tensor) -> bool:
        return native.readable(states)

    def __call__(self, states: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(states.to(self.dtype), self.weight, self.bias, "none", [], "")


class _Own:
    """By code compiled here; the product is of float32."""

    name: ClassVar[str] = "code compiled here"

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.bias = products.pack(weight, dtype), None if bias is None else bias.contiguous()

    def takes(self, states: Tensor) -> bool:
        return native.readable(states) and products.knows(self.weight.dtype)

    def __call__(self, states: Tensor) -> Tensor:
        found = products.multiply(states.reshape(-1, states.shape[-1]).float(), self.weight, self.bias)
        return found.view(*states.shape[:-1], self.weight.outputs)


class _Defined:
    """Products of whole numbers in torch operations."""

    name: ClassVar[str] = "torch operations"

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        quantization.require_depth(weight.shape[1])
        self.weight, self.bias = quantization.quantize(weight), bias

    def takes(self, states: Tensor) -> bool:
        return True

    def __call__(self, states: Tensor) -> Tensor:
        return quantization.multiply(states, self.weight, self.bias)


def _serves(layer: nn.Linear, quantized: Quantization | None) -> bool:
    if type(layer) is not nn.Linear or "forward" in vars(layer):  # a parametrised layer is of another type
        return False
    weight, given = layer.weight, [each for each in (layer.weight, layer.bias) if each is not None]
    plain = all(each.dtype == torch.float32 for each in given) and weight.numel() > 0
    here = quantized is not None or weight.device.type == "cpu"
    return plain and here and native.readable(*given)


def _wanted_type(device: str) -> torch.dtype:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


def _way(dtype: torch.dtype) -> type[_Way] | None:
    """What packs weights of that type: code compiled here, unless the library was measured to be clearly faster."""
    if dtype == torch.int8:
        return _Own if _own_packs(dtype) else _Defined
    library = _library_packs(dtype)
    if not _own_packs(dtype):
        return _Library if library else None
    gain = _own_gain(dtype, torch.get_num_threads()) if library else None
    return _Own if gain is None or gain >= _CLEARLY else _Library


def _own_packs(dtype: torch.dtype) -> bool:
    return products.serves(dtype=dtype) and _own_is_exact(dtype)


@functools.cache
def _own_is_exact(dtype: torch.dtype) -> bool:
    return _is_exact(_Own, dtype)


@functools.cache
def _library_packs(dtype: torch.dtype) -> bool:
    """Whether this torch packs weights, and computes with them as exactly as it says."""
    if dtype not in _FILES or not torch.backends.mkldnn.is_available():
        return False
    try:
        return _is_exact(_Library, dtype)
    except (AttributeError, RuntimeError):  # another torch, or a processor for which it packs nothing
        return False


def _is_exact(way: type[_Way], dtype: torch.dtype) -> bool:
    depth = 600 if dtype != torch.int8 else 2100
    for rows in (1, 2, 200):  # of few rows and many, of columns and depths that are cut, in all threads
        states, weight = _drawn(rows, 150, depth)
        bias, rounded = weight[:, 0], [_rounded(each, dtype) for each in (states, weight)]
        exact = rounded[0] @ rounded[1].T + bias.double()
        if not (way(weight, bias, dtype)(states).double() - exact).norm() <= _ERRORS[dtype] * exact.norm():
            return False
    return True


def _rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """As they are multiplied, in float64."""
    if dtype != torch.int8:
        return rows.to(dtype).double()
    whole, step = quantization.quantize(rows)
    return whole.double() * step.double()


@functools.cache
def _own_gain(dtype: torch.dtype, threads: int) -> float | None:  # threads: part of the name under which it is kept
    """How many times as fast code compiled here is as the library with a step of 64 rows; None where that cannot be
    kept."""

    def measure() -> float:
        states, weights = _drawn(_ROWS, 512, 512)[0], [_drawn(1, 512, 512)[1] for _ in range(_WEIGHTS)]
        kinds = (("library", _Library), ("own", _Own))
        ways = {name: [way(each, None, dtype) for each in weights] for name, way in kinds}
        turns = {name: lambda of=of: [each(states) for each in of] for name, of in ways.items()}
        return measured.gain(turns, _TURNS, enough=_CLEARLY)

    return measured.once(_FILES[dtype], "own_gain", measure, of=products.version())


def _drawn(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(0)  # a training's draws go on as they would have
    kind = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    states, weight = (torch.randn(each, inputs, generator=own, **kind) for each in (rows, outputs))
    return states, weight
