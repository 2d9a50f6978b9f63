"""A step of a Transformer's decoder in compiled code (_decoder_step.cpp), in few calls: with few rows those of torch
operations take longer than what they compute.

The definition is in transformer.py. An attention that _few.cpp does not know is asked between two calls.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.attention.backends import few
from attnbench.attention.backends.picked import Picked, sources
from attnbench.attention.modules.base import Attention
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.transforms import _rows
from attnbench.attention.types import Memory, Positions
from attnbench.core import native, packed
from attnbench.core.tree import Shared
from attnbench.models import _decoder_layout as layout
from attnbench.models.layers import Embedding, require_positions

_ASK, _ATTEND, _ASK_SOURCE, _ATTEND_SOURCE, _FINISH = range(5)
"""Stages of a layer."""
_NOTHING = few.Rows(), few.Rows(), 0, few.ALL
"""What is attended where compiled code does not attend: keys, values, how many, which."""


class CompiledDecoder(Shared):
    """A decoder with the weights that it has packed now: see `compile_decoder` (decoder_compile.py)."""

    def __init__(self, embedding: Embedding, sites: Sequence[layout.Sites], given: layout.Given) -> None:
        self._embedding, self._sites, self._given = embedding, sites, given

    def __deepcopy__(self, memo: object) -> CompiledDecoder:
        return self  # nothing in it changes

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # addresses mean nothing to another process: the definition serves there

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
        library: Any = native.loaded(layout.SOURCE)
        sites, given = self._sites, self._given
        grown = tuple(each.attention.grown(cache, 1) for each, cache in zip(sites, caches, strict=True))
        of_cache = [each.attention.own_of_cache(at) if each.compiled else None for each in sites]
        keeps = [each.attention.keep_of_cache(at) if each.compiled else None for each in sites]
        of_source = _of_sources(sites, at, memories) if beams <= few.MOST else [None] * len(sites)
        room = _Room(token, given, _most(memories, grown, [*of_cache, *of_source]))
        if library.attnbench_decoder_embed(
            ctypes.byref(given.embeddings), native.at(token), *map(ctypes.c_int64, (len(token), at)), room.states
        ):
            raise IndexError(f"a token has no row among the {given.embeddings.count} embeddings")
        steps = (layout.Step * len(sites))(*(
            room.step(beams, *each) for each in zip(memories, grown, of_source, of_cache, keeps, strict=True)
        ))  # fmt: skip
        if None not in of_cache and None not in of_source:
            _run(given.layers, steps)
        else:
            own, source = step_positions(at, beams, memories[0].values.shape[2], token.device)
            for place, each in enumerate(sites):
                layer, step, first = given.layers[place], steps[place], _ASK
                if of_cache[place] is None:
                    _run(layer, step, first, _ASK)
                    received = _received(each.attention, room.queries(), 1, grown[place], own)
                    step.context, first = received.data_ptr(), _ASK_SOURCE
                if of_source[place] is None:
                    _run(layer, step, first, _ASK_SOURCE)
                    received = _received(each.cross, room.queries(), beams, memories[place], source)
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
        if torch.is_grad_enabled() or not packed.serves(given.dtype) or native.load(layout.SOURCE) is None:
            return False
        if any(held.get("forward") is not packing for held, packing in given.packings):  # a block of `packed` has ended
            return False
        if token.dim() != 1 or token.dtype != torch.int64 or not token.is_cpu or not len(token) or len(token) % beams:
            return False
        rows = len(token)
        for each, memory, cache in zip(self._sites, memories, caches, strict=True):
            if cache.filled != at or not _holds(cache, each.attention, rows):
                return False
            if not isinstance(each.cross, MultiHead) or not each.cross_compiled:
                continue
            if not _holds(memory, each.cross, rows // beams) or not _marks(memory.valid, memory.values):
                return False
        return native.readable(token)


class _Room:
    """What the layers of one step write to, one after the other."""

    def __init__(self, token: Int[Tensor, "R"], given: layout.Given, keys: int) -> None:
        """keys: the most that a query attends."""
        self.rows, self.width = len(token), given.embeddings.width
        heads = max(each.heads for each in given.layers)
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
    ) -> layout.Step:  # fmt: skip
        """of_source, of_cache: what is attended; None where compiled code does not attend. keep: what of the cache is
        whatever its scores. They must live as long."""
        keys, values = cache.keys, cache.values
        assert keys is not None  # allocate() made them
        assert cache.filled is not None
        held = few.rows_of(keys), few.rows_of(values)
        own, source, valid, kept = _NOTHING, _NOTHING, _rows.NOTHING, _rows.NOTHING
        if of_cache is not None:
            own = _attended(*held, of_cache, cache.filled)
            if keep is not None:
                kept = _rows.strided(keep.expand(self.rows, keys.shape[1], 1, -1))
        if of_source is not None:
            assert memory.keys is not None  # a MultiHead made them
            rows = few.rows_of(memory.keys), few.rows_of(memory.values)
            source = _attended(*rows, of_source, memory.values.shape[2])
            if of_source.there is not None:
                outer, middle, _, key = of_source.there.stride()
                valid = _rows.Strided(of_source.there.data_ptr(), outer, middle, 0, key)
            elif memory.valid is not None and isinstance(of_source.keys, slice):
                valid = _rows.Strided(memory.valid.data_ptr(), memory.valid.stride(0), 0, 0, memory.valid.stride(1))
        return layout.Step(self.rows, beams, cache.filled - 1, *held, *own, kept, *source, valid, *self.addresses)


def _attended(keys: few.Rows, values: few.Rows, own: Picked, count: int) -> tuple[few.Rows, few.Rows, int, few.Listed]:
    """Of so many keys and values those that are attended, how many, and which where they are listed."""
    if not isinstance(own.keys, slice):
        return keys, values, own.keys.shape[2], few.listed_of(own.keys)
    span = range(count)[own.keys]
    key, value = (
        few.Rows(each.data + 4 * span.start * each.position, each.batch, each.head, each.position * span.step)
        for each in (keys, values)
    )
    return key, value, len(span), few.ALL


def _most(memories: Sequence[Memory], caches: Sequence[Memory], own: Sequence[Picked | None]) -> int:
    """Keys that a query attends at most: lists may be longer than sources."""
    listed = (each.keys.shape[2] for each in own if each is not None and not isinstance(each.keys, slice))
    return max(*(each.values.shape[2] for each in memories), *(each.filled or 0 for each in caches), *listed)


def _of_sources(sites: Sequence[layout.Sites], at: int, memories: Sequence[Memory]) -> list[Picked | None]:
    """The keys of its memory that each layer attends at position `at`; None where compiled code does not attend."""
    found: list[Picked | None] = []
    valid, given = None, None  # those of all layers are the same, as a rule
    for each, memory in zip(sites, memories, strict=True):
        if not isinstance(each.cross, MultiHead) or not each.cross_compiled:
            found.append(None)
        elif not each.cross.choice.picks:
            found.append(Picked(slice(None)))
        else:
            rows, _, width, _ = memory.values.shape
            if given is None or given.width != width or not _same(memory.valid, valid):
                valid, given = memory.valid, sources(rows, width, memory.valid)
            found.append(each.cross.own_of_sources(at, given))
    return found


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two masks are the same, or there is none."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def step_positions(at: int, beams: int, keys: int, device: torch.device) -> tuple[Positions, Positions]:
    """Those of a step at position `at` over the cache, and over so many source positions, which the beams of a source
    ask side by side."""
    asks = torch.full((1,), at, device=device)
    over = (torch.arange(count, device=device) for count in (at + 1, keys))
    return Positions(asks, next(over)), Positions(asks.expand(beams), next(over))


def _run(layers: Any, steps: Any, first: int = _ASK, last: int = _FINISH) -> None:
    """Stages of layers, or of one."""
    run: Any = native.loaded(layout.SOURCE).attnbench_decoder_layers
    count = ctypes.c_int64(len(steps) if isinstance(steps, ctypes.Array) else 1)
    if run(ctypes.byref(layers), ctypes.byref(steps), count, first, last, torch.get_num_threads()):
        raise MemoryError("no memory for a step of the decoder")


def _received(
    attention: Attention, queries: Float[Tensor, "R D"], beams: int, memory: Memory, positions: Positions
) -> Float[Tensor, "B Q D"]:
    """What an attention that is not compiled gives: of a MultiHead before its last projection."""
    queries = queries.view(-1, beams, queries.shape[1])
    if type(attention) is not MultiHead:
        return attention(queries, memory, positions).context.float().contiguous()
    split = queries.unflatten(-1, (attention.heads, -1)).transpose(1, 2)
    mixed = attention.mix(split, memory, positions, None, False)[0]
    return mixed.transpose(1, 2).flatten(2).float().contiguous()


def _holds(memory: Memory, attention: MultiHead, rows: int) -> bool:
    """Whether compiled code can read its keys and values, of so many rows."""
    keys, values = memory.keys, memory.values
    if keys is None or not layout.fit(keys, values) or keys.requires_grad or values.requires_grad:
        return False
    return (
        keys.shape
        == values.shape
        == (rows, attention.heads, values.shape[2], attention.context_width // attention.heads)
    )


def _marks(valid: Tensor | None, values: Tensor) -> bool:
    """Whether compiled code can read a mask of these."""
    if valid is None:
        return True
    fits = valid.is_cpu and valid.dtype == torch.bool and valid.shape == (len(values), values.shape[2])
    return fits and valid.stride(-1) == 1 and native.readable(valid)
