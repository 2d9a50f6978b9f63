"""A step of a Transformer's decoder in compiled code (_decoder_step.cpp), in few calls: with few rows those of torch
operations take longer than what they compute.

The definition is in transformer.py. An attention that _few.cpp does not know is asked between two calls.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.attention import cached
from attnbench.attention.backends.picked import Picked
from attnbench.attention.modules.base import Attention
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.transforms import rowwise
from attnbench.attention.types import Memory
from attnbench.core import native, packed
from attnbench.models import _decoder_layout as layout
from attnbench.models import _decoder_sources as read
from attnbench.models.layers import Embedding, require_positions

SOURCE = Path(__file__).with_name("_decoder_step.cpp")
_ASK, _ATTEND, _ASK_SOURCE, _ATTEND_SOURCE, _FINISH = range(5)
"""Stages of a layer."""


class Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class Layer(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int64), ("pre_norm", ctypes.c_int), ("norms", Norm * 3), ("own", layout.Site),
        ("source", layout.Site), ("memory", layout.Linear), ("expand", layout.Linear), ("contract", layout.Linear),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("beams", ctypes.c_int64), ("filled", ctypes.c_int64),
        ("keys", cached.Rows), ("values", cached.Rows), ("own", layout.Held), ("source", layout.Held),
        ("states", ctypes.c_void_p), ("queries", ctypes.c_void_p), ("context", ctypes.c_void_p),
        ("room", ctypes.c_void_p), ("branch", ctypes.c_void_p), ("scores", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
    )  # fmt: skip


class Output(ctypes.Structure):
    _fields_ = (("norm", ctypes.POINTER(Norm)), ("linear", layout.Linear))


class Sites(NamedTuple):
    """The attentions of a layer, and whether compiled code knows them."""

    attention: MultiHead
    compiled: bool
    cross: Attention
    cross_compiled: bool


class Given(NamedTuple):
    """What compiled code reads. inner: the widest of what a layer makes. dtype: of packed weights. packings: what
    layers hold, and what packs their weights there. held: what must live as long."""

    embeddings: layout.Embeddings
    layers: ctypes.Array[Layer]
    output: Output
    inner: int
    dtype: torch.dtype
    packings: list[tuple[dict[str, Any], Any]]
    held: list[Any]


class CompiledDecoder(layout.Addresses):
    """A decoder with the weights that it has packed now: see `compile_decoder` (decoder_compile.py)."""

    def __init__(self, embedding: Embedding, sites: Sequence[Sites], given: Given) -> None:
        self._embedding, self._sites, self._given = embedding, sites, given

    def step(
        self, token: Int[Tensor, "R"], at: int, memories: Sequence[Memory], caches: Sequence[Memory], beams: int
    ) -> tuple[Float[Tensor, "R V"], tuple[Memory, ...]] | None:
        """The logits after one more token a row, which stands at position `at`, and the caches with it, which are
        written in place; None where that is left to the definition, and nothing is written.

        memories: of each layer, R / `beams` rows, one a source. caches: of each layer, R rows. Raises IndexError for a
        token that has no embedding, ValueError where a cache is full, AttnbenchError past the last position.
        """
        if not self._serves(token, at, memories, caches, beams):
            return None
        require_positions(at + 1, self._embedding.max_length)
        token = token.contiguous()  # those of one source's beam may lie apart
        library: Any = native.loaded(SOURCE)
        sites, given = self._sites, self._given
        grown = tuple(each.attention.grown(cache, 1) for each, cache in zip(sites, caches, strict=True))
        of_cache = [each.attention.own_of_cache(at) if each.compiled else None for each in sites]
        keeps = [each.attention.keep_of_cache(at) if each.compiled else None for each in sites]
        of_source = read.of_sources(((each.cross, each.cross_compiled) for each in sites), at, memories, beams)
        room = _Room(token, given, _most(memories, grown, [*of_cache, *of_source]))
        if library.attnbench_decoder_embed(
            ctypes.byref(given.embeddings), native.at(token), *map(ctypes.c_int64, (len(token), at)), room.states
        ):
            raise IndexError(f"a token has no row among the {given.embeddings.count} embeddings")
        steps = (_Step * len(sites))(*(
            room.step(beams, *each) for each in zip(memories, grown, of_source, of_cache, keeps, strict=True)
        ))  # fmt: skip
        if None not in of_cache and None not in of_source:
            _run(given.layers, steps)
        else:
            own, source = read.step_positions(at, beams, memories[0].values.shape[2], token.device)
            for place, each in enumerate(sites):
                layer, step, first = given.layers[place], steps[place], _ASK
                if of_cache[place] is None:
                    _run(layer, step, first, _ASK)
                    received = read.received(each.attention, room.queries(), 1, grown[place], own)
                    step.context, first = received.data_ptr(), _ASK_SOURCE
                if of_source[place] is None:
                    _run(layer, step, first, _ASK_SOURCE)
                    received = read.received(each.cross, room.queries(), beams, memories[place], source)
                    step.context, first = received.data_ptr(), _FINISH
                _run(layer, step, first, _FINISH)
        logits = room.buffer.new_empty(len(token), given.output.linear.weight.outputs)
        library.attnbench_decoder_logits(
            ctypes.byref(given.output), room.states, ctypes.c_int64(len(token)), room.branch, native.at(logits),
            torch.get_num_threads(),
        )  # fmt: skip
        return logits, grown

    def _serves(self, token: Tensor, at: int, memories: Sequence[Memory], caches: Sequence[Memory], beams: int) -> bool:
        given = self._given
        if torch.is_grad_enabled() or not packed.serves(given.dtype) or native.load(SOURCE) is None:
            return False
        if any(held.get("forward") is not packing for held, packing in given.packings):  # a block of `packed` has ended
            return False
        if not read.fits(token, beams):
            return False
        rows = len(token)
        for each, memory, cache in zip(self._sites, memories, caches, strict=True):
            if cache.filled != at or not read.holds(cache, each.attention, rows):
                return False
            if each.cross_compiled and not read.holds(memory, each.cross, rows // beams):
                return False
        return True


class _Room:
    """What the layers of one step write to, one after the other."""

    def __init__(self, token: Int[Tensor, "R"], given: Given, keys: int) -> None:
        """keys: the most that a query attends."""
        self.rows, self.width = len(token), given.embeddings.width
        heads = max(max(each.own.heads, each.source.heads) for each in given.layers)
        all_keys, wide = self.rows * heads * keys, self.rows * self.width
        self.buffer = torch.empty(4 * wide + self.rows * given.inner + 2 * all_keys, dtype=torch.float32, device="cpu")
        ends = itertools.accumulate((wide, wide, wide, wide, self.rows * given.inner, all_keys), initial=0)
        at = self.buffer.data_ptr()
        states, queries, context, branch, inner, scores, weights = (at + 4 * end for end in ends)
        self.states, self.branch = ctypes.c_void_p(states), ctypes.c_void_p(branch)
        self.addresses = (states, queries, context, inner, branch, scores, weights)

    def queries(self) -> Float[Tensor, "R D"]:
        wide = self.rows * self.width
        return self.buffer[wide : 2 * wide].view(self.rows, self.width)

    def step(
        self, beams: int, memory: Memory, cache: Memory, of_source: Picked | None, of_cache: Picked | None,
        keep: Bool[Tensor, "1 1 1 K"] | None,
    ) -> _Step:  # fmt: skip
        """of_source, of_cache: what is attended; None where compiled code does not attend. keep: what of the cache is
        whatever its scores. They must live as long."""
        keys, values = cache.keys, cache.values
        assert keys is not None  # allocate() made them
        assert cache.filled is not None
        rows, own, kept = (cached.rows_of(keys), cached.rows_of(values)), read.NOTHING, rowwise.NOTHING
        if keep is not None:
            kept = rowwise.strided(keep.expand(self.rows, keys.shape[1], 1, -1))
        if of_cache is not None:
            own = read.held(*rows, of_cache, cache.filled, keep=kept)
        source = read.held_of_source(memory, of_source)
        return _Step(self.rows, beams, cache.filled - 1, *rows, own, source, *self.addresses)


def _most(memories: Sequence[Memory], caches: Sequence[Memory], picked: Sequence[Picked | None]) -> int:
    """Keys that a query attends at most."""
    held = (*(each.values.shape[2] for each in memories), *(each.filled or 0 for each in caches))
    return max(*held, read.most_listed(picked))


def _run(layers: Any, steps: Any, first: int = _ASK, last: int = _FINISH) -> None:
    """Stages of layers, or of one."""
    run: Any = native.loaded(SOURCE).attnbench_decoder_layers
    count = ctypes.c_int64(len(steps) if isinstance(steps, ctypes.Array) else 1)
    if run(ctypes.byref(layers), ctypes.byref(steps), count, first, last, torch.get_num_threads()):
        raise MemoryError("no memory for a step of the decoder")
