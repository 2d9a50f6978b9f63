"""Products with a weight that is packed once for many of them, in code compiled here (_products.cpp): in float32, or
where the processor multiplies those, of numbers rounded to bfloat16 or to whole numbers of 8 bits (quantization.py)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attnbench.core import native
from attnbench.core.quantization import quantize, require_depth

_SOURCE = Path(__file__).with_name("_products.cpp")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8"}
"""Types of a packed weight, as the compiled code calls them."""
_TAKES: dict[str, list[Any]] = {
    "pack": [ctypes.c_void_p, *2 * [ctypes.c_int64], ctypes.c_void_p, ctypes.c_int],
    "product": [ctypes.c_void_p, ctypes.c_int64, *3 * [ctypes.c_void_p], ctypes.c_int64, ctypes.c_int],
}
"""What its functions take: addresses, sizes, threads."""


class Packed(ctypes.Structure):
    """A packed weight as compiled code reads it, where `_products.hpp` is included."""

    _fields_ = (
        ("words", ctypes.c_void_p), ("outputs", ctypes.c_int64), ("inputs", ctypes.c_int64),
        ("steps", ctypes.c_void_p), ("begin", ctypes.c_void_p),
    )  # fmt: skip


class PackedWeight(NamedTuple):
    """A weight of N x K, packed into panels: W words of 32 bits hold K numbers."""

    words: Float[Tensor, "P W C"]
    dtype: torch.dtype
    outputs: int
    inputs: int
    steps: Float[Tensor, "N 1"] | None = None
    """What 1 is worth in each row of whole numbers."""
    begin: Int[Tensor, "N"] | None = None
    """What sums of whole numbers begin with."""

    def read(self) -> Packed:
        """As compiled code reads it, while this lives."""
        steps, begin = (None if each is None else each.data_ptr() for each in (self.steps, self.begin))
        return Packed(self.words.data_ptr(), self.outputs, self.inputs, steps, begin)


def serves(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the compiled code takes these with a weight packed in that type."""
    fits = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in tensors)
    return fits and native.readable(*tensors) and knows(dtype)


def version() -> str:
    """Of the compiled code: another one for another source, compiler or processor. Only where `serves`."""
    return Path(native.loaded(_SOURCE)._name).stem


def pack(weight: Float[Tensor, "N K"], dtype: torch.dtype = torch.float32) -> PackedWeight:
    """A copy for `multiply`, rounded to that type. K at least 1, and for whole numbers, whose sums have 32 bits, at
    most 65,536, else ValueError. Raises TypeError for other numbers than float32 on a processor; only where `serves`.
    """
    _require(weight)
    outputs, inputs = weight.shape
    steps = begin = None
    if dtype == torch.int8:
        require_depth(inputs)
        weight, steps = quantize(weight)
        raised = native.loaded(_SOURCE).attnbench_raised()
        begin = (weight.nan_to_num(0.0).sum(-1, dtype=torch.float64) * -raised).to(torch.int32)
    weight = weight.contiguous()
    width = native.loaded(_SOURCE).attnbench_panel()
    words = weight.new_empty(-(-outputs // width), -(-inputs * dtype.itemsize // 4), width)
    _function("pack", dtype)(weight.data_ptr(), outputs, inputs, words.data_ptr(), torch.get_num_threads())
    return PackedWeight(words, dtype, outputs, inputs, steps, begin)


def multiply(
    states: Float[Tensor, "M K"], weight: PackedWeight, bias: Float[Tensor, "N"] | None = None
) -> Float[Tensor, "M N"]:
    """`states @ weight^T + bias` in float32, the states rounded to the weight's type; not differentiable; only where
    `serves`. In bfloat16 what is too small for a normal number (1.2e-38) counts as 0.

    Each row is the same to the last digit whatever rows stand beside it, and however many threads there are. Raises
    TypeError like `pack`, ValueError for shapes that do not fit.
    """
    _require(*(each for each in (states, bias) if each is not None))
    rows, inputs = states.shape
    if inputs != weight.inputs or (bias is not None and bias.shape != (weight.outputs,)):
        raise ValueError(
            f"states of {inputs} and a bias of {None if bias is None else tuple(bias.shape)} do not fit a weight of "
            f"{weight.outputs} x {weight.inputs}"
        )
    states = states if states.stride(1) == 1 else states.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = states.new_empty(rows, weight.outputs)
    _function("product", weight.dtype)(
        states.data_ptr(), states.stride(0), ctypes.byref(weight.read()), None if bias is None else bias.data_ptr(),
        out.data_ptr(), rows, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _require(*tensors: Tensor) -> None:
    for each in tensors:
        if each.dtype != torch.float32 or each.device.type != "cpu":
            raise TypeError(f"numbers of float32 on a processor are multiplied here, not {each.dtype} on {each.device}")


def knows(dtype: torch.dtype) -> bool:
    """Whether there is compiled code for products of that type."""
    library = native.load(_SOURCE)
    return library is not None and dtype in _NAMES and hasattr(library, f"attnbench_product_{_NAMES[dtype]}")


def address(dtype: torch.dtype) -> ctypes.c_void_p:
    """Where what multiplies by weights of that type lies, for other compiled code; only where `serves`."""
    return ctypes.cast(_function("product", dtype), ctypes.c_void_p)


def _function(name: str, dtype: torch.dtype) -> Any:
    found: Any = getattr(native.loaded(_SOURCE), f"attnbench_{name}_{_NAMES[dtype]}")
    if found.argtypes is None:
        found.argtypes, found.restype = _TAKES[name], None
    return found
