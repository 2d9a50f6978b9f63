"""Products with a weight that is packed once for many of them, in code compiled here (_products.cpp), in float32."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.core import native

_SOURCE = Path(__file__).with_name("_products.cpp")


class PackedWeight(NamedTuple):
    """A weight of N x K, packed into panels."""

    numbers: Float[Tensor, "P K C"]
    outputs: int


def serves(*tensors: Tensor) -> bool:
    """Whether the compiled code takes these."""
    fits = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in tensors)
    return fits and native.readable(*tensors) and native.load(_SOURCE) is not None


def version() -> str:
    """Of the compiled code: another one for another source, compiler or processor. Only where `serves`."""
    return Path(native.loaded(_SOURCE)._name).stem


def pack(weight: Float[Tensor, "N K"]) -> PackedWeight:
    """A copy for `multiply`. K at least 1. Raises TypeError for other numbers than float32 on a processor; only where
    `serves`."""
    _require(weight)
    library, weight = _library(), weight.contiguous()
    outputs, inputs = weight.shape
    width = library.attnbench_panel()
    numbers = weight.new_empty(-(-outputs // width), inputs, width)
    library.attnbench_pack(weight.data_ptr(), outputs, inputs, numbers.data_ptr(), torch.get_num_threads())
    return PackedWeight(numbers, outputs)


def multiply(
    states: Float[Tensor, "M K"], weight: PackedWeight, bias: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "M N"]:
    """`states @ weight^T + bias`, not differentiable; only where `serves`.

    Each row is the same to the last digit whatever rows stand beside it, and however many threads there are. Raises
    TypeError like `pack`, ValueError for shapes that do not fit.
    """
    _require(*(each for each in (states, bias) if each is not None))
    rows, inputs = states.shape
    if inputs != weight.numbers.shape[1] or (bias is not None and bias.shape != (weight.outputs,)):
        raise ValueError(
            f"states of {inputs} and a bias of {None if bias is None else tuple(bias.shape)} do not fit a weight of "
            f"{weight.outputs} x {weight.numbers.shape[1]}"
        )
    states = states if states.stride(1) == 1 else states.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = states.new_empty(rows, weight.outputs)
    _library().attnbench_product(
        states.data_ptr(), states.stride(0), weight.numbers.data_ptr(), None if bias is None else bias.data_ptr(),
        out.data_ptr(), rows, weight.outputs, inputs, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _require(*tensors: Tensor) -> None:
    for each in tensors:
        if each.dtype != torch.float32 or each.device.type != "cpu":
            raise TypeError(f"numbers of float32 on a processor are multiplied here, not {each.dtype} on {each.device}")


def _library() -> Any:
    library: Any = native.loaded(_SOURCE)
    if library.attnbench_product.argtypes is None:
        number, at = ctypes.c_int64, ctypes.c_void_p
        library.attnbench_pack.argtypes = [at, number, number, at, ctypes.c_int]
        library.attnbench_product.argtypes = [at, number, at, at, at, number, number, number, ctypes.c_int]
        library.attnbench_pack.restype = library.attnbench_product.restype = None
    return library
