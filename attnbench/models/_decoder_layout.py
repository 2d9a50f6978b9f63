"""What compiled steps of decoders share (_decoder.hpp), as it lies there: linear layers, attentions, embeddings."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnbench.attention import cached
from attnbench.attention.backends import few
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.modules.single_head import SingleHead
from attnbench.attention.transforms import rowwise
from attnbench.core import hooks, native, packed, products
from attnbench.core.packed_steps import Window
from attnbench.core.tree import Shared

Weights = Mapping[nn.Module, packed.Compiled]
"""What code compiled here has packed of a decoder: linear layers and convolutions."""


class Linear(ctypes.Structure):
    _fields_ = (("product", ctypes.c_void_p), ("weight", products.Packed), ("bias", ctypes.c_void_p))


class Site(ctypes.Structure):
    _fields_ = (
        ("query", Linear), ("context", Linear), ("heads", ctypes.c_int64), ("attend", ctypes.c_void_p),
        ("forward", ctypes.c_void_p), ("transform", rowwise.Transform), ("scale", ctypes.c_float),
    )  # fmt: skip


class Held(ctypes.Structure):
    _fields_ = (
        ("keys", cached.Rows), ("values", cached.Rows), ("positions", ctypes.c_int64), ("listed", cached.Listed),
        ("keep", rowwise.Strided), ("valid", rowwise.Strided),
    )  # fmt: skip


class Embeddings(ctypes.Structure):
    _fields_ = (
        ("table", ctypes.c_void_p), ("count", ctypes.c_int64), ("row", ctypes.c_int64), ("scale", ctypes.c_float),
        ("positions", ctypes.c_void_p), ("position", ctypes.c_int64), ("width", ctypes.c_int64),
    )  # fmt: skip


class Addresses(Shared):
    """A decoder as compiled code reads it: nothing in it changes, and to another process it means nothing."""

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # the definition serves there


def linear(of: packed.Compiled) -> Linear:
    """A packed layer, or a convolution over what it sees at once; its weight must live as long."""
    weight, bias = of
    return Linear(products.address(weight.dtype), weight.read(), None if bias is None else bias.data_ptr())


def site(of: nn.Module, weights: Weights, held: list[Any]) -> tuple[Site, bool]:
    """An attention, and whether compiled code attends in its place. held: takes up what must live as long."""
    query, context = Linear(), Linear()  # which leave as they are what goes through them
    if type(of) is MultiHead:
        query, context = linear(weights[of.project_query]), linear(weights[of.project_context])
    elif type(of) is not SingleHead:
        return Site(), False
    known = of.few_transform
    if known is None:
        return Site(query, context, of.heads), False
    scores = torch.empty(2, of.heads, 2, 1, dtype=torch.float32, device="cpu")  # any rows and queries: strides of 0
    transform, kept = rowwise.read(known, scores)
    held.append(kept)
    return Site(query, context, of.heads, few.address(), rowwise.address(), transform, of.score.scale), True


def embeddings(table: nn.Embedding, positions: Tensor, scale: float, held: list[Any]) -> Embeddings:
    """held: takes up what must live as long."""
    held += [table.weight.detach(), positions.detach()]  # the same numbers, whatever becomes of the layer
    return Embeddings(
        table.weight.data_ptr(), len(table.weight), table.weight.stride(0), scale, positions.data_ptr(),
        positions.stride(0), table.embedding_dim,
    )  # fmt: skip


def is_bare(part: nn.Module) -> bool:
    """Whether nothing but what its class says happens in it, but that its weights may be packed."""
    if part.training or hooks.are_on(part, hooks.FORWARD):
        return False
    return "forward" not in vars(part) or isinstance(part, (nn.Linear, Window))


def fit(*tensors: Tensor | None) -> bool:
    """Whether compiled code can read them: numbers of float32 on a processor, those of one position side by side."""
    for each in tensors:
        if each is None or each.dtype != torch.float32 or not each.is_cpu or each.stride(-1) != 1 or not each.numel():
            return False
        if not native.readable(each):
            return False
    return True
