"""A step of a Transformer's decoder in compiled code (_decoder_step.cpp), one call a layer: with few rows the calls of
torch operations take longer than what they compute.

The definition is `DecoderLayer.step`. An attention that _few.cpp does not know is asked between two calls.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnbench.attention.backends import few
from attnbench.attention.modules.base import Attention
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.scores.base import Score
from attnbench.attention.transforms import _rows
from attnbench.attention.types import Memory, Positions
from attnbench.core import native, packed, products
from attnbench.core.tree import Shared
from attnbench.models.layers import FeedForward, Residual

if TYPE_CHECKING:
    from attnbench.models.transformer import DecoderLayer

_SOURCE = Path(__file__).with_name("_decoder_step.cpp")
_ASK, _ATTEND, _ASK_SOURCE, _ATTEND_SOURCE, _FINISH = range(5)
"""Stages of a layer."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class _Linear(ctypes.Structure):
    _fields_ = (("product", ctypes.c_void_p), ("weight", products.Packed), ("bias", ctypes.c_void_p))


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class _Site(ctypes.Structure):
    _fields_ = (
        ("query", _Linear), ("context", _Linear), ("attend", ctypes.c_void_p), ("forward", ctypes.c_void_p),
        ("transform", _rows.Transform), ("scale", ctypes.c_float),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int64), ("heads", ctypes.c_int64), ("before", ctypes.c_int), ("norms", _Norm * 3),
        ("own", _Site), ("source", _Site), ("memory", _Linear), ("expand", _Linear), ("contract", _Linear),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("beams", ctypes.c_int64), ("filled", ctypes.c_int64),
        ("keys", few.Rows), ("values", few.Rows), ("own_keys", few.Rows), ("own_values", few.Rows),
        ("own", ctypes.c_int64), ("source_keys", few.Rows), ("source_values", few.Rows), ("positions", ctypes.c_int64),
        ("valid", _rows.Strided), ("states", ctypes.c_void_p), ("asked", ctypes.c_void_p),
        ("context", ctypes.c_void_p), ("room", ctypes.c_void_p), ("more", ctypes.c_void_p),
        ("scores", ctypes.c_void_p), ("weights", ctypes.c_void_p),
    )  # fmt: skip


class _Compiled(NamedTuple):
    """attention, cross: those of the layer. given: the layer as compiled code reads it. own, source: whether that
    attention is compiled, too. held: what must live as long."""

    attention: MultiHead
    cross: Attention
    given: _Layer
    own: bool
    source: bool
    held: list[Any]


class CompiledDecoder(Shared):
    """The layers of a decoder with the weights that they have packed now: see `compile_decoder`."""

    def __init__(self, layers: Sequence[_Compiled], dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype

    def step(
        self,
        states: Float[Tensor, "R 1 D"],
        memories: Sequence[Memory],
        caches: Sequence[Memory],
        beams: int,
        positions: Callable[[], tuple[Positions, Positions]],
    ) -> tuple[Float[Tensor, "R 1 D"], tuple[Memory, ...]] | None:
        """One position of every row through all layers, and the caches with it; None where that is left to the
        definition. The states are written to.

        memories: of each layer, one row a source, which `beams` rows share. positions: those of a step over the cache
        and over the source, for an attention that is not compiled.
        """
        if not self._serves(states, memories, caches):
            return None
        states = states.contiguous()
        grown = tuple(each.attention.grown(cache, 1) for each, cache in zip(self._layers, caches, strict=True))
        room, places = _Room(states, self._layers, memories, grown), functools.cache(positions)
        for each, memory, cache in zip(self._layers, memories, grown, strict=True):
            span = each.attention.span((cache.filled or 0) - 1) if each.own else None
            own, source = span is not None, each.source and beams <= few.MOST
            step = room.step(memory if source else None, cache, span or range(0), beams)
            first = _ASK
            if not own:
                _run(each, step, first, _ASK)
                received = _received(each.attention, room.asked, 1, cache, places()[0])
                step.context, first = received.data_ptr(), _ASK_SOURCE
            if not source:
                _run(each, step, first, _ASK_SOURCE)
                received = _received(each.cross, room.asked, beams, memory, places()[1])
                step.context, first = received.data_ptr(), _FINISH
            _run(each, step, first, _FINISH)
        return states, grown

    def _serves(self, states: Tensor, memories: Sequence[Memory], caches: Sequence[Memory]) -> bool:
        if torch.is_grad_enabled() or not packed.serves(self._dtype) or not _fit(states):
            return False
        for each, memory, cache in zip(self._layers, memories, caches, strict=True):
            if not _fit(cache.keys, cache.values):
                return False
            if each.source and not (_fit(memory.keys, memory.values) and _marks(memory.valid)):
                return False
        return native.load(_SOURCE) is not None


class _Room:
    """What the layers of one step write to, one after the other."""

    def __init__(
        self,
        states: Float[Tensor, "R 1 D"],
        layers: Sequence[_Compiled],
        memories: Sequence[Memory],
        caches: Sequence[Memory],
    ) -> None:
        rows, _, width = states.shape
        inner = max(2 * width, *(each.given.expand.weight.outputs for each in layers))
        heads = max(each.given.heads for each in layers)
        keys = max(*(each.values.shape[2] for each in memories), *(each.filled or 0 for each in caches))
        sizes = (rows * width, rows * width, rows * inner, rows * width, *2 * (rows * heads * keys,))
        parts = states.new_empty(sum(sizes)).split(sizes)
        self.states, self.asked, self.parts = states, parts[0].view(rows, width), parts
        self.addresses = [states.data_ptr(), *(each.data_ptr() for each in parts)]

    def step(self, memory: Memory | None, cache: Memory, span: range, beams: int) -> _Step:
        """memory: None where its attention is not compiled. span: what of the cache is attended."""
        assert cache.keys is not None  # allocate() made them
        assert cache.filled is not None
        held = few.rows_of(cache.keys), few.rows_of(cache.values)
        own = [few.Rows(r.data + 4 * span.start * r.position, r.batch, r.head, r.position * span.step) for r in held]
        source, count, valid = (few.Rows(), few.Rows()), 0, _rows.NOTHING
        if memory is not None:
            assert memory.keys is not None  # a MultiHead made them
            source, count = (few.rows_of(memory.keys), few.rows_of(memory.values)), memory.values.shape[2]
            if memory.valid is not None:
                valid = _rows.Strided(memory.valid.data_ptr(), memory.valid.stride(0), 0, 0, memory.valid.stride(1))
        return _Step(
            len(self.asked), beams, cache.filled - 1, *held, *own, len(span), *source, count, valid, *self.addresses
        )


def compile_decoder(layers: Sequence[DecoderLayer]) -> CompiledDecoder | None:
    """The layers as they are now, for steps until their weights change; None where code compiled here has not packed
    these, and where a layer is not as transformer.py makes it, is in training or has hooks."""
    if torch.is_grad_enabled() or native.load(_SOURCE) is None:
        return None
    found, dtypes = [], set[torch.dtype]()
    for layer in layers:
        own = layer.attention
        linears = [each for each in layer.modules() if isinstance(each, nn.Linear)]
        weights = {each: held for each in linears if (held := packed.compiled(each)) is not None}
        if type(own) is not MultiHead or not _is_known(layer, own) or len(weights) < len(linears):
            return None
        found.append(_compiled(layer, own, weights))
        dtypes |= {held.weight.dtype for held in weights.values()}
    return CompiledDecoder(found, dtypes.pop()) if len(dtypes) == 1 else None


def _is_known(layer: DecoderLayer, own: MultiHead) -> bool:
    """Whether the definition does what compiled code would do."""
    residuals = _residuals(layer)
    if (
        type(own.score).keys is not Score.keys
        or type(layer.feed_forward) is not FeedForward
        or any(type(each) is not Residual for each in residuals)
    ):
        return False
    for each in layer.modules():
        if each.training or any(getattr(each, hooks) for hooks in _HOOKS):
            return False
        if "forward" in vars(each) and not isinstance(each, nn.Linear):
            return False
    norms = [each.norm for each in residuals]
    return all(type(each) is nn.LayerNorm and _fit(each.weight, each.bias) for each in norms)


def _compiled(layer: DecoderLayer, own: MultiHead, weights: Mapping[nn.Linear, packed.Compiled]) -> _Compiled:
    residuals = _residuals(layer)
    held: list[Any] = [weights, residuals]

    def linear(of: nn.Linear) -> _Linear:
        weight, bias = weights[of]
        return _Linear(products.address(weight.dtype), weight.read(), None if bias is None else bias.data_ptr())

    def site(of: Attention) -> tuple[_Site, bool]:
        if type(of) is not MultiHead:
            return _Site(), False  # it is given the states as they are
        query, context = linear(of.project_query), linear(of.project_context)
        known = of.few_transform
        if known is None:
            return _Site(query, context), False
        transform, kept = _rows.read(known, torch.empty(2, of.heads, 2, 1))  # any rows and queries: strides of 0
        held.append(kept)
        return _Site(query, context, few.address(), _rows.address(), transform, of.score.scale), True

    forward = layer.feed_forward
    own_site, own_compiled = site(own)
    source_site, source_compiled = site(layer.cross)
    norms = [_Norm(each.norm.weight.data_ptr(), each.norm.bias.data_ptr(), each.norm.eps) for each in residuals]
    given = _Layer(
        own.context_width, own.heads, residuals[0].before, (_Norm * 3)(*norms), own_site, source_site,
        linear(own.project_memory), linear(forward.expand), linear(forward.contract),
    )  # fmt: skip
    return _Compiled(own, layer.cross, given, own_compiled, source_compiled, held)


def _residuals(layer: DecoderLayer) -> tuple[Residual, Residual, Residual]:
    return layer.attention_residual, layer.cross_residual, layer.feed_forward_residual


def _run(compiled: _Compiled, step: _Step, first: int, last: int) -> None:
    run: Any = native.loaded(_SOURCE).attnbench_decoder_step
    if run(ctypes.byref(compiled.given), ctypes.byref(step), first, last, torch.get_num_threads()):
        raise MemoryError("no memory for a step of the decoder")


def _received(
    attention: Attention, asked: Float[Tensor, "R D"], beams: int, memory: Memory, positions: Positions
) -> Float[Tensor, "B Q D"]:
    """What an attention that is not compiled gives: of a MultiHead before its last projection."""
    asked = asked.view(-1, beams, asked.shape[1])
    if type(attention) is not MultiHead:
        return attention(asked, memory, positions).context.float().contiguous()
    queries = asked.unflatten(-1, (attention.heads, -1)).transpose(1, 2)
    mixed = attention.mix(queries, memory, positions, None, False)[0]
    return mixed.transpose(1, 2).flatten(2).float().contiguous()


def _marks(valid: Tensor | None) -> bool:
    """Whether compiled code can read a mask."""
    return valid is None or (valid.is_cpu and valid.stride(-1) == 1 and native.readable(valid))


def _fit(*tensors: Tensor | None) -> bool:
    """Whether compiled code can read them: numbers of float32 on a processor, those of one position side by side."""
    for each in tensors:
        if each is None or each.dtype != torch.float32 or not each.is_cpu or each.stride(-1) != 1 or not each.numel():
            return False
        if not native.readable(each):
            return False
    return True
