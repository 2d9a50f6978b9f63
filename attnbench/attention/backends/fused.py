"""Sparse attention in Triton: scores, weights and contexts in one kernel, which never writes a score (_forward.py,
_backward.py).

Rows of few weights have their thresholds from the largest scores of classes of keys (_peaks.py; of entmax-1.5 in half
precision, _rough.py); long ones go by lists of the keys that can have a weight (_listed.py).
For softmax over the k best keys, sparsemax and alpha-entmax with alpha in (1, 2], in float32, float16 and bfloat16.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.transforms.base import Fused, FusedKind
from attnbench.attention.transforms.gpu_kinds import EXCESS, KINDS, LEAST
from attnbench.core.derivatives import once_differentiable
from attnbench.core.errors import MissingExtraError
from attnbench.core.kernels import compiles, installed, interpreted

__all__ = ["FEWEST", "LONG", "WIDEST", "attend", "compiles", "has_kernel", "interpreted", "kernels"]

WIDEST = 128
"""The widest head: of queries and keys, and of values."""
_UNMEASURED = -1
"""Of no kind: as kernels are for one whose tile has not been measured."""
_ALL = 1 << 30
"""More keys than there are: top-k is softmax."""
LONG: dict[FusedKind, int] = {"topk": 1280, "sparsemax": 1024, "entmax15": 4608}
"""The fewest keys that are listed, by kind; an alpha nearer to 1 leaves more weights than lists pay for."""
_MOST_DROPPED = 1 - 2**-24
"""The largest rate of dropout below 1 in float32."""
_TURNS = 4
"""Blocks of queries that one program goes through, at most, where the keys are one block."""
FEWEST = 64
"""The fewest queries for which keys are listed, or thresholds found by a kernel of their own."""
_ROOM: dict[FusedKind, int] = {"topk": 64, "sparsemax": 64, "entmax15": 128}
"""The most keys that are listed for a row, by kind."""
_Part = Literal["forward", "peaks", "thresholds", "contexts", "again", "short", "query", "key", "dropped"]
"""Which kernel; again: that of contexts, for rows that need it; short: of gradients, where keys are one block;
dropped: of those of keys, with dropout."""


class _Tile(NamedTuple):
    """Queries and keys at most of what a program computes at once, and what it may take. registers: at most, so that
    more programs share a processor; 0: as many as it wants."""

    queries: int
    keys: int
    stages: int = 2
    registers: int = 0


_FMA = {"enable_fp_fusion": True}
"""A product and a sum are one operation, whatever Triton takes for a rule."""
_AGAIN = 16
"""Queries of a block that is mixed again: one of more would be waited for as long as all the others took."""
_TILES: dict[_Part | tuple[_Part, int], _Tile] = {
    "forward": _Tile(64, 64, 3),
    "peaks": _Tile(64, 64, 3),
    ("peaks", 0): _Tile(64, 64, 2, 128),
    ("peaks", 1): _Tile(64, 64, 3, 168),
    ("peaks", 3): _Tile(64, 64, 3, 168),
    "thresholds": _Tile(64, 64, 2, 128),
    "contexts": _Tile(64, 64, 3, 168),
    "again": _Tile(64, 64),
    "short": _Tile(64, 64),
    "query": _Tile(64, 64, 2, 128),
    ("query", 0): _Tile(64, 32, 3, 128),
    ("query", 1): _Tile(64, 32, 3, 128),
    ("query", 3): _Tile(64, 32, 3, 168),
    "key": _Tile(128, 64),
    ("key", 0): _Tile(32, 64, 3, 128),
    "dropped": _Tile(64, 64, 3),
}
"""By kernel, some by kind, for heads of at most 64 in half precision: the fastest of those measured on an H100, within
some percent; for gradients of queries by top-k the one that has registers for products."""
_CLASSES: dict[int, int] = {0: 32, 1: 32, 2: 64, 3: 32}
"""Of how many classes of keys the four largest scores are kept, by kind, for a first search (_classes.py)."""
_FEW = 32
"""The largest k of top-k that is searched for among them."""
_FARTHEST = 2**31 - 1
"""Numbers from the first state of a head to its last: places of states have 32 bits."""
_SCATTERED = 8
"""The largest k of top-k whose keys seldom share a class of 32 by fours."""


def has_kernel(transform: Fused) -> bool:
    """Whether the kernels know this transform."""
    return transform.kind in KINDS and transform.keep is None and transform.share is None and not transform.first


def attend(
    query: Float[Tensor, "B H Q E"],
    keys: Float[Tensor, "B H K E"],
    values: Float[Tensor, "B H K E2"],
    transform: Fused,
    *,
    scale: float,
    valid: Bool[Tensor, "B K"] | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Float[Tensor, "B H Q E2"]:
    """Context of every query, in the type of the values. scale: of the products. causal: query i stands at the place
    K - Q + i of the keys. dropout: on the weights, drawn from torch's generator.

    Raises MissingExtraError where neither Triton nor a GPU is there, ValueError for a transform that they do not know
    and for heads of more numbers than they count.
    """
    if not has_kernel(transform):
        raise ValueError(f"there is no kernel for {transform}; drop `backend: triton`")
    if kernels() is None or not (query.is_cuda or interpreted()):
        raise MissingExtraError(
            "the backend 'triton' needs a CUDA device and the package triton; drop `backend: triton`, or take both"
        )
    reaches = [each.shape[2] * each.stride(2) for each in (query, keys, values)]
    if max(*reaches, query.shape[1] * query.shape[2] * values.shape[3]) > _FARTHEST:
        raise ValueError(
            f"the kernels find no more than {_FARTHEST:,} numbers from the first state of a head to its last; attend "
            "to a part of the queries at a time, or drop `backend: triton`"
        )
    wide = functools.reduce(torch.promote_types, (each.dtype for each in (query, keys, values)))
    if interpreted() and wide == torch.bfloat16:  # whose bits Triton's interpreter would multiply as whole numbers
        wide = torch.float32
    query, keys, held = query.to(wide), keys.to(wide), values.to(wide)
    if scale <= 0:  # to the kernels the best keys are those of the largest products
        query, scale = query * (-1.0 if scale < 0 else 0.0), abs(scale) or 1.0
    heads, excess = query.shape[1], transform.excess
    if isinstance(excess, Tensor):
        excess = excess.float().clamp(min=LEAST).flatten().expand(heads).contiguous()
    else:
        excess = _constant(max(LEAST, EXCESS.get(transform.kind, excess)), heads, query.device)
    # drawn on the device, or a call that is recorded would drop the same weights whenever it is played
    seed = torch.randint(1 << 62, (1,), device=query.device) if dropout else None
    given = _Given(
        KINDS[transform.kind], transform.k or _ALL, scale, causal, min(dropout, _MOST_DROPPED),
        _room(transform, query, keys),
    )  # fmt: skip
    context: Tensor = _Attention.apply(query, keys, held, excess, valid, seed, given)  # pyright: ignore[reportAssignmentType]
    return context.to(values.dtype)


@functools.cache
def _constant(value: float, heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # that a training after an evaluation may keep it
        return torch.full((heads,), value, device=device)


def _room(transform: Fused, query: Tensor, keys: Tensor) -> int:
    """How many keys are listed for a row; 0: none, where rows are short or hold many weights, and where gradients must
    not depend on the order in which a GPU adds."""
    room = _ROOM.get(transform.kind, 0)
    short = keys.shape[2] < LONG.get(transform.kind, 0) or query.shape[2] < FEWEST
    dense = transform.kind == "topk" and (transform.k or _ALL) > room // 2
    return 0 if short or dense or torch.are_deterministic_algorithms_enabled() else room


class _Kernels(NamedTuple):
    forward: Any
    peaks: Any
    rough: Any
    backward: Any
    listed: Any


@functools.cache
def kernels() -> _Kernels | None:
    """The modules of kernels; None without Triton."""
    if not installed():
        return None
    return _Kernels(
        *(
            importlib.import_module(f"attnbench.attention.backends.{each}")
            for each in ("_forward", "_peaks", "_rough", "_backward", "_listed")
        )
    )


class _Given(NamedTuple):
    """What a call does not differentiate."""

    kind: int
    k: int
    scale: float
    causal: bool
    dropout: float
    room: int


class _Listed(NamedTuple):
    """Of each row, the bits of the score and the place of keys that can have a weight, and how many they are; of each
    head, whether a row has more than there is room for. Kept for backward, 8 bytes an entry."""

    lists: Tensor
    found: Tensor
    crowded: Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, excess: Tensor, valid: Tensor | None,
        seed: Tensor | None, given: _Given,
    ) -> Tensor:  # fmt: skip
        query, keys, values = (_last_dense(each) for each in (query, keys, values))
        batch, heads, rows, _ = query.shape
        # the heads of a query beside each other, as a model joins them: that needs no copy then
        out = values.new_empty(batch, rows, heads, values.shape[3]).transpose(1, 2)
        grows = any(ctx.needs_input_grad[:4])
        # what has no use is not read or written: any tensor stands for it
        # in half precision gradients are compared with means that are rounded, as those of softmax by its contexts
        slope = torch.empty(out.shape, dtype=query.dtype, device=out.device) if grows and given.kind else excess
        sizes = _sizes(query, keys, values, "forward", given.kind)
        short = keys.shape[2] <= sizes["BLOCK_N"]
        classes = 0 if short or given.room else min(_classes(given, query.dtype), sizes["BLOCK_N"])
        if classes:  # a program of more classes than were measured wants more registers
            measured = classes <= _CLASSES[given.kind]
            sizes = _sizes(query, keys, values, "peaks", given.kind if measured else _UNMEASURED)
        rough = classes > 0 and _is_rough(given, query)
        kept = grows or given.room or rough
        threshold, most, inverse = excess.new_empty(3, batch, heads, rows) if kept else (excess,) * 3
        seed = excess if seed is None else seed
        mask = excess if valid is None else valid.expand(batch, -1).contiguous().view(torch.uint8)
        listed = _Listed(excess, excess, excess)
        if out.numel():
            q, k, v, o = (each.stride()[:3] for each in (query, keys, values, out))
            size = (heads, rows, keys.shape[2])
            where = {"KIND": given.kind, "CAUSAL": given.causal, "VALID": valid is not None}
            how = {"KIND": given.kind, "DROPOUT": given.dropout > 0, "GRADIENT": grows}
            ahead, width = keys.shape[2] - rows, values.shape[3]
            module = kernels()
            assert module is not None
            if given.room:
                listed = _lists(query, given.room)
                first, second = _listed_sizes(query, values, given)
                module.listed.choose[_grid(rows, first["BLOCK_M"], batch * heads)](
                    query, keys, *listed[:2], most, threshold, listed.crowded, mask, excess,
                    *q, *k, mask.stride(0), *size, query.shape[3], ahead, given.scale, given.k,
                    **where, **first, ROOM=given.room, PLAIN=interpreted() or torch.version.hip is not None,
                )  # fmt: skip
                module.listed.mix[_grid(rows, second["BLOCK_M"], batch * heads)](
                    values, *listed[:2], out, slope, threshold, most, inverse, excess,
                    *v, *o, *size, width, given.k, seed, given.dropout, **how, **second, ROOM=given.room,
                )  # fmt: skip
            grid, how = _grid(rows, sizes["BLOCK_M"], batch * heads), {**where, **how}
            made = (query, keys, values, out, slope, threshold, most, inverse, mask, excess)
            steps = (*q, *k, *v, *o, mask.stride(0), *size, query.shape[3], width, ahead, given.scale, given.k, seed)
            full = _fills(query, values, sizes)
            if rough:
                _mix_roughly(made, seed, given, masked=valid is not None, grows=grows)
            elif classes:
                module.peaks.peaks[grid](*made, *steps, given.dropout, **how, **sizes, CLASSES=classes, FULL=full)
            else:
                module.forward.forward[grid](
                    *made, *listed[1:], *steps, given.dropout, **how, **sizes, ROOM=given.room, SHORT=short, FULL=full
                )
        ctx.given = given
        ctx.save_for_backward(query, keys, values, excess, mask, seed, out, slope, threshold, most, inverse, *listed)
        ctx.masked = valid is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, keys, values, excess, mask, seed, out, slope, threshold, most, inverse, *rest = ctx.saved_tensors
        given: _Given = ctx.given
        listed = _Listed(*rest)
        up = _last_dense(upstream[0])
        batch, heads, rows, _ = query.shape
        mean, shift = inverse.new_empty(2, *inverse.shape)
        learned = ctx.needs_input_grad[3]
        of_excess = torch.empty_like(mean) if learned else excess
        of_query = _last_dense(torch.empty_like(query))
        # what is listed is added up in float32, from 0
        new, kind = (torch.zeros, torch.float32) if given.room else (torch.empty, query.dtype)
        of_both = new(keys.numel() + values.numel(), dtype=kind, device=keys.device)
        of_keys, of_values = _parts(of_both, keys, values)
        q, k, v, u, gq, gk, gv = (each.stride()[:3] for each in (query, keys, values, up, of_query, of_keys, of_values))
        size = (heads, rows, keys.shape[2], query.shape[3], values.shape[3])
        ahead = keys.shape[2] - rows
        how = {"KIND": given.kind, "DROPOUT": given.dropout > 0}
        where = {"CAUSAL": given.causal, "VALID": ctx.masked, "ROOM": given.room}
        sizes = _sizes(query, keys, values, "short", given.kind)
        read = (query, keys, values, up)
        through = slope if given.kind else out
        s = through.stride()[:3]
        kept = (threshold, most, inverse)
        module = kernels()
        assert module is not None
        if not out.numel() or not keys.shape[2]:
            for each in (of_query, of_both, *((of_excess,) if learned else ())):
                each.zero_()
        elif rows <= _TURNS * sizes["BLOCK_M"] and not given.room and _is_short(keys, sizes):
            module.backward.backward_short[(batch * heads,)](
                *read, through, mean, *kept, mask, excess, of_query, of_excess, of_keys, of_values,
                *q, *k, *v, *u, *s, *gq, *gk, *gv, mask.stride(0), *size, ahead, given.scale, seed, given.dropout,
                CAUSAL=given.causal, VALID=ctx.masked, LEARNED=learned, **how, **sizes,
            )  # fmt: skip
        else:
            if given.room:
                second = _listed_sizes(query, values, given)[1]
                module.listed.spread[_grid(rows, second["BLOCK_M"], batch * heads)](
                    *read, through, mean, *listed[:2], *kept, excess, of_query, of_keys, of_values,
                    *q, *k, *v, *u, *s, *gq, *size, given.scale, seed, given.dropout,
                    **how, WIDTH=sizes["WIDTH"], **second, ROOM=given.room,
                )  # fmt: skip
            sizes = _sizes(query, keys, values, "query", given.kind)
            module.backward.backward_query[_grid(rows, sizes["BLOCK_M"], batch * heads)](
                *read, through, mean, shift, *kept, mask, excess, listed.found, listed.crowded, of_query, of_excess,
                *q, *k, *v, *u, *s, *gq, mask.stride(0), *size, ahead, given.scale, seed, given.dropout,
                LEARNED=learned, **how, **where, **sizes, FULL=_fills(query, values, sizes),
            )  # fmt: skip
            sizes = _sizes(query, keys, values, "dropped" if given.dropout else "key", given.kind)
            module.backward.backward_key[_grid(keys.shape[2], sizes["BLOCK_N"], batch * heads)](
                *read, mean, shift, threshold, inverse, mask, excess, listed.found, listed.crowded, of_keys, of_values,
                *q, *k, *v, *u, *gk, *gv, mask.stride(0), *size, ahead, given.scale, seed, given.dropout,
                **how, **where, **sizes, EVEN=rows % sizes["BLOCK_M"] == 0 and _fills(query, values, sizes),
            )  # fmt: skip
        slopes = _parts(of_both.to(keys.dtype), keys, values)
        return of_query, *slopes, of_excess.sum((0, 2)) if learned else None, None, None, None


def _is_rough(given: _Given, query: Tensor) -> bool:
    """Whether thresholds have a kernel of their own, which does not find their last digits (_rough.py)."""
    return given.kind == KINDS["entmax15"] and query.dtype != torch.float32 and query.shape[2] >= FEWEST


def _mix_roughly(made: tuple[Tensor, ...], seed: Tensor, given: _Given, *, masked: bool, grows: bool) -> None:
    """made: query, keys, values, contexts, slope, threshold, most, inverse, mask, excess; what kernels of contexts read
    and write."""
    module = kernels()
    assert module is not None
    query, keys, values, out, _, threshold, most, _, mask, excess = made
    batch, heads, rows, width = query.shape
    q, k, v, o = (each.stride()[:3] for each in (query, keys, values, out))
    size, ahead = (heads, rows, keys.shape[2], width), keys.shape[2] - rows
    number = torch.empty_like(threshold)
    sizes = _sizes(query, keys, values, "thresholds", given.kind)
    where = {"CAUSAL": given.causal, "VALID": masked, "FULL": _fills(query, values, sizes)}
    of_scores = {name: size for name, size in sizes.items() if name != "VALUE_WIDTH"}
    module.rough.thresholds[_grid(rows, sizes["BLOCK_M"], batch * heads)](
        query, keys, threshold, most, number, mask, excess, *q, *k, mask.stride(0), *size, ahead, given.scale,
        **where, **of_scores,
    )  # fmt: skip
    again = torch.empty_like(threshold, dtype=torch.int32)
    for part in ("contexts", "again"):
        sizes = _sizes(query, keys, values, part, given.kind)
        module.rough.contexts[_grid(rows, sizes["BLOCK_M"], batch * heads)](
            *made[:8], number, again, mask, excess, *q, *k, *v, *o, mask.stride(0), *size, values.shape[3], ahead,
            given.scale, seed, given.dropout,
            **where, DROPOUT=given.dropout > 0, GRADIENT=grows, AGAIN=part == "again", **sizes,
        )  # fmt: skip


def _parts(both: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors that lie one after the other, by the shapes of keys and values."""
    return both[: keys.numel()].view(keys.shape), both[keys.numel() :].view(values.shape)


def _lists(query: Tensor, room: int) -> _Listed:
    batch, heads, rows, _ = query.shape
    kind = {"dtype": torch.int32, "device": query.device}
    return _Listed(
        torch.empty(batch, heads, rows, room, 2, **kind),
        torch.empty(batch, heads, rows, **kind),
        torch.zeros(batch, heads, **kind),
    )


def _classes(given: _Given, dtype: torch.dtype) -> int:
    """Of how many classes of keys the largest scores are kept, at most; 0: more keys may have a weight than these tell.
    As many as a tile has keys in float32 and in the interpreter, where another width may round otherwise."""
    many = given.kind == KINDS["topk"] and given.k > _FEW
    if many:
        return 0
    dense = given.kind == KINDS["topk"] and given.k > _SCATTERED
    return 64 if dense or interpreted() or dtype == torch.float32 else _CLASSES[given.kind]


def _listed_sizes(query: Tensor, values: Tensor, given: _Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tiles and warps of what lists keys, and of what gathers them. The narrower tile is the faster one; it knows half
    as many best scores, of which there must be some more than are kept."""
    width, value_width = (max(16, 1 << (each.shape[3] - 1).bit_length()) for each in (query, values))
    exact = query.dtype == torch.float32  # which takes twice the memory that a block of threads shares
    many = given.kind == KINDS["topk"] and given.k > given.room // 4
    first = {"BLOCK_M": 32 if exact and width > 64 else 64, "BLOCK_N": 64 if many else 32, "WIDTH": width}
    second = {"BLOCK_M": 8, "VALUE_WIDTH": value_width, "UNROLL": 4}
    if interpreted():
        return first, second
    return {**first, "num_warps": 4, "num_stages": 2 if exact else 3, **_FMA}, {**second, "num_warps": 2, **_FMA}


def _is_short(keys: Tensor, sizes: dict[str, Any]) -> bool:
    """Whether one kernel makes all gradients: the keys are one block, and its scores, states and gradients fit the
    memory that threads share, of which smaller GPUs have 99 KiB. In float32 wide heads take 144 for 32 keys."""
    wide = max(sizes["WIDTH"], sizes["VALUE_WIDTH"]) > 64
    room = 16 if wide and keys.dtype == torch.float32 else sizes["BLOCK_N"]
    return keys.shape[2] <= room


def _last_dense(states: Tensor) -> Tensor:
    states = states.resolve_neg()
    return states if states.stride(-1) == 1 else states.contiguous()


def _grid(rows: int, block: int, heads: int) -> tuple[int]:
    return (-(-rows // block) * heads,)


def _fills(query: Tensor, values: Tensor, sizes: dict[str, Any]) -> bool:
    return query.shape[3] == sizes["WIDTH"] and values.shape[3] == sizes["VALUE_WIDTH"]


def _sizes(query: Tensor, keys: Tensor, values: Tensor, part: _Part, kind: int) -> dict[str, Any]:
    """Tiles, warps and registers of one kernel; a product wants 16 of everything at least."""
    width, value_width = (max(16, 1 << (each.shape[3] - 1).bit_length()) for each in (query, values))
    exact = query.dtype == torch.float32
    wide = max(width, value_width) > 64
    if exact or wide:
        back = part in ("short", "query", "key", "dropped")
        block = 32 if exact and (wide or back) else 64
        tile = _Tile(32 if wide and back and keys.shape[2] <= block else block, block)  # see _is_short
    else:
        tile = _TILES.get((part, kind)) or _TILES[part]
    if part == "again":
        tile = tile._replace(queries=_AGAIN)
    # one query, as in a step of decoding, has a small tile, and so have short sentences
    whole = (max(16, 1 << (each.shape[2] - 1).bit_length()) for each in (query, keys))
    rows, columns = map(min, whole, tile)
    sizes = {"BLOCK_M": rows, "BLOCK_N": columns, "WIDTH": width, "VALUE_WIDTH": value_width}
    if interpreted():
        return sizes
    warps = 8 if wide and not exact and rows * columns > 1 << 10 else 4
    if torch.version.hip is not None:  # nothing of which was measured there
        return {**sizes, "num_warps": warps, "num_stages": 2, **_FMA}
    most = {"maxnreg": tile.registers} if tile.registers else {}
    return {**sizes, "num_warps": warps, "num_stages": tile.stages, **most, **_FMA}
