"""What one step of a decoder in compiled code reads of keys and values, and what it asks of an attention that compiled
code does not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.attention import cached
from attnbench.attention.backends.picked import Picked, sources
from attnbench.attention.modules.base import Attention
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.modules.single_head import SingleHead
from attnbench.attention.transforms import rowwise
from attnbench.attention.types import Memory, Positions
from attnbench.core import native
from attnbench.models import _decoder_layout as layout

NOTHING = layout.Held(cached.Rows(), cached.Rows(), 0, cached.ALL, rowwise.NOTHING, rowwise.NOTHING)
"""Where compiled code does not attend."""


def of_sources(
    asked: Iterable[tuple[Attention, bool]], at: int, memories: Sequence[Memory], beams: int
) -> list[Picked | None]:
    """The keys of its memory that each attention attends at position `at`; None where compiled code does not attend.

    asked: attentions, and whether compiled code knows them. beams: rows a source.
    """
    found: list[Picked | None] = []
    valid, given = None, None  # those of all layers are the same, as a rule
    for (attention, known), memory in zip(asked, memories, strict=True):
        if not known or beams > cached.MOST:
            found.append(None)
            continue
        assert isinstance(attention, (MultiHead, SingleHead))  # or it were not known
        if not attention.choice.picks:
            found.append(Picked(slice(None)))
            continue
        rows, _, width, _ = memory.values.shape
        if given is None or given.width != width or not _same(memory.valid, valid):
            valid, given = memory.valid, sources(rows, width, memory.valid)
        found.append(attention.own_of_sources(at, given))
    return found


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two masks are the same, or there is none."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def held_of_source(memory: Memory, picked: Picked | None) -> layout.Held:
    """What is attended of a source, while it lives; NOTHING where compiled code does not attend."""
    if picked is None:
        return NOTHING
    assert memory.keys is not None  # `holds` said so
    valid = rowwise.NOTHING
    if picked.there is not None:
        outer, middle, _, key = picked.there.stride()
        valid = rowwise.Strided(picked.there.data_ptr(), outer, middle, 0, key)
    elif memory.valid is not None and isinstance(picked.keys, slice):
        valid = rowwise.Strided(memory.valid.data_ptr(), memory.valid.stride(0), 0, 0, memory.valid.stride(1))
    rows = cached.rows_of(memory.keys), cached.rows_of(memory.values)
    return held(*rows, picked, memory.values.shape[2], valid=valid)


def held(
    keys: cached.Rows, values: cached.Rows, picked: Picked, count: int, *, keep: rowwise.Strided = rowwise.NOTHING,
    valid: rowwise.Strided = rowwise.NOTHING,
) -> layout.Held:  # fmt: skip
    """Of so many keys and values those that are picked."""
    if not isinstance(picked.keys, slice):
        return layout.Held(keys, values, picked.keys.shape[2], cached.listed_of(picked.keys), keep, valid)
    span = range(count)[picked.keys]
    key, value = (
        cached.Rows(each.data + 4 * span.start * each.position, each.batch, each.head, each.position * span.step)
        for each in (keys, values)
    )
    return layout.Held(key, value, len(span), cached.ALL, keep, valid)


def most_listed(picked: Iterable[Picked | None]) -> int:
    """Keys of the longest list, which may be longer than what it lists keys of; 0 without one."""
    given = (each.keys for each in picked if each is not None)
    return max((each.shape[2] for each in given if not isinstance(each, slice)), default=0)


def step_positions(at: int, beams: int, keys: int, device: torch.device) -> tuple[Positions, Positions]:
    """Those of a step at position `at` over the cache, and over so many source positions, which the beams of a source
    ask side by side."""
    asks = torch.full((1,), at, device=device)
    over = (torch.arange(count, device=device) for count in (at + 1, keys))
    return Positions(asks, next(over)), Positions(asks.expand(beams), next(over))


def received(
    attention: Attention, queries: Float[Tensor, "R D"], beams: int, memory: Memory, positions: Positions
) -> Float[Tensor, "B Q D2"]:
    """What an attention that is not compiled gives: of a MultiHead before its last projection."""
    queries = queries.view(-1, beams, queries.shape[1])
    if type(attention) is not MultiHead:
        return attention(queries, memory, positions).context.float().contiguous()
    split = queries.unflatten(-1, (attention.heads, -1)).transpose(1, 2)
    mixed = attention.mix(split, memory, positions, None, False)[0]
    return mixed.transpose(1, 2).flatten(2).float().contiguous()


def fits(token: Tensor, beams: int) -> bool:
    """Whether compiled code can read these: a token a row, `beams` rows a source."""
    if token.dim() != 1 or token.dtype != torch.int64 or not token.is_cpu or not native.readable(token):
        return False
    return len(token) > 0 and len(token) % beams == 0


def holds(memory: Memory, attention: Attention, rows: int) -> bool:
    """Whether compiled code can read its keys and values, of so many rows, and which are valid."""
    keys, values = memory.keys, memory.values
    assert isinstance(attention, (MultiHead, SingleHead))  # or it were not known
    if keys is None or not layout.fit(keys, values) or keys.requires_grad or values.requires_grad:
        return False
    heads = attention.heads
    if not keys.shape == values.shape == (rows, heads, values.shape[2], attention.context_width // heads):
        return False
    return memory.valid is None or _marks(memory.valid, values)


def _marks(valid: Tensor, values: Float[Tensor, "B H K E"]) -> bool:
    fit = valid.is_cpu and valid.dtype == torch.bool and valid.shape == (len(values), values.shape[2])
    return fit and valid.stride(-1) == 1 and native.readable(valid)
