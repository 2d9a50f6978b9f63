"""What _decoder_step.cpp reads, as it lies there, and which tensors it can read."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnbench.attention.backends import few
from attnbench.attention.modules.base import Attention
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.transforms import _rows
from attnbench.core import native, products

SOURCE = Path(__file__).with_name("_decoder_step.cpp")


class Linear(ctypes.Structure):
    _fields_ = (("product", ctypes.c_void_p), ("weight", products.Packed), ("bias", ctypes.c_void_p))


class Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class Site(ctypes.Structure):
    _fields_ = (
        ("query", Linear), ("context", Linear), ("attend", ctypes.c_void_p), ("forward", ctypes.c_void_p),
        ("transform", _rows.Transform), ("scale", ctypes.c_float),
    )  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int64), ("heads", ctypes.c_int64), ("pre_norm", ctypes.c_int), ("norms", Norm * 3),
        ("own", Site), ("source", Site), ("memory", Linear), ("expand", Linear), ("contract", Linear),
    )  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("beams", ctypes.c_int64), ("filled", ctypes.c_int64),
        ("keys", few.Rows), ("values", few.Rows), ("own_keys", few.Rows), ("own_values", few.Rows),
        ("own", ctypes.c_int64), ("own_listed", few.Listed), ("keep", _rows.Strided),
        ("source_keys", few.Rows), ("source_values", few.Rows), ("positions", ctypes.c_int64),
        ("source_listed", few.Listed), ("valid", _rows.Strided), ("states", ctypes.c_void_p),
        ("queries", ctypes.c_void_p), ("context", ctypes.c_void_p), ("room", ctypes.c_void_p),
        ("branch", ctypes.c_void_p), ("scores", ctypes.c_void_p), ("weights", ctypes.c_void_p),
    )  # fmt: skip


class Embeddings(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p), ("count", ctypes.c_int64), ("row", ctypes.c_int64), ("scale", ctypes.c_float),
        ("positions", ctypes.c_void_p), ("position", ctypes.c_int64), ("width", ctypes.c_int64),
    )  # fmt: skip


class Output(ctypes.Structure):
    _fields_ = (("norm", ctypes.POINTER(Norm)), ("linear", Linear))


class Sites(NamedTuple):
    """The attentions of a layer, and whether compiled code knows them."""

    attention: MultiHead
    compiled: bool
    cross: Attention
    cross_compiled: bool


class Given(NamedTuple):
    """What compiled code reads. inner: the widest of what a layer makes. dtype: of packed weights. packings: what
    layers hold, and what packs their weights there. held: what must live as long."""

    embeddings: Embeddings
    layers: ctypes.Array[Layer]
    output: Output
    inner: int
    dtype: torch.dtype
    packings: list[tuple[dict[str, Any], Any]]
    held: list[Any]


def fit(*tensors: Tensor | None) -> bool:
    """Whether compiled code can read them: numbers of float32 on a processor, those of one position side by side."""
    for each in tensors:
        if each is None or each.dtype != torch.float32 or not each.is_cpu or each.stride(-1) != 1 or not each.numel():
            return False
        if not native.readable(each):
            return False
    return True
