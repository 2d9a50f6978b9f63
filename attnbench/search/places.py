"""The places of a beam search, and what a step makes of them.

Compiled (_places.cpp) a step is one call, where torch takes many small operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attnbench.core import native
from attnbench.search.base import DEAD_END, Hypothesis

_SOURCE = Path(__file__).with_name("_places.cpp")


class Live(NamedTuple):
    """The places of the sources still searched (n rows)."""

    source: Int[Tensor, "n"]
    """Its row in the batch."""
    log_prob: Float[Tensor, "n size"]
    """-inf: an empty place."""
    tokens: Int[Tensor, "n size L"]
    taken: Int[Tensor, "n"]
    """Places that ended hypotheses have taken with them."""
    lineage: Int[Tensor, "n size L"]
    """The place in which each token was put: hypotheses with the same one are the same up to there."""

    def shared(self, step: int) -> int:
        """The length of the prefix, BOS included, that is the same in all active places of a source: the shortest of
        all sources'."""
        if not step:
            return 1
        before = self.lineage[:, :, :step]
        place = torch.arange(before.shape[1], device=before.device)
        lost = (place >= (before.shape[1] - self.taken)[:, None]) & (self.log_prob == -torch.inf)
        same = ((before == before[:, :1]) | lost[:, :, None]).all(1)
        return 1 + int(same.to(torch.int32).cumprod(1).sum(1).min())


class Ended:
    """The hypotheses that ended, in a table of `size` places a source of the batch, filled in the order of ending.

    rows: sources of the batch. capacity: most tokens of a hypothesis. dtype: of scores."""

    def __init__(self, rows: int, size: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.score = torch.full((rows, size), -torch.inf, dtype=dtype, device=device)
        self.log_prob = torch.full((rows, size), -torch.inf, dtype=dtype, device=device)
        self.length = torch.zeros((rows, size), dtype=torch.long, device=device)
        self.tokens = torch.zeros((rows, size, capacity), dtype=torch.long, device=device)

    def add(
        self,
        live: Live,
        ends: Bool[Tensor, "n size"],
        length: int,
        divisor: float,
        penalty: Float[Tensor, "n size"] | None,
    ) -> None:
        row, place = ends.nonzero(as_tuple=True)
        into = live.source[row], (live.taken[:, None] + ends.cumsum(1) - 1)[row, place]
        log_prob = live.log_prob[row, place]
        self.log_prob[into] = log_prob
        self.score[into] = log_prob / divisor + (0.0 if penalty is None else penalty[row, place].to(log_prob.dtype))
        self.length[into] = length
        self.tokens[into] = live.tokens[row, place]

    def hypotheses(self, eos: int, n_best: int) -> list[list[Hypothesis]]:
        columns = (self.tokens, self.length, self.log_prob, self.score)
        found = []
        for source in zip(*(column.tolist() for column in columns), strict=True):
            row = []
            for tokens, length, log_prob, score in zip(*source, strict=True):
                if length:
                    finished = tokens[length - 1] == eos
                    row.append(Hypothesis(tokens[: length - finished], log_prob, score, finished))
            row.sort(
                key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score)
            )  # stable: the sooner ended first
            found.append(row[:n_best] or [DEAD_END])
        return found


class Tokens(NamedTuple):
    """The likeliest next tokens of each place, best first, or of each source where its places are the same (search/
    candidates.py)."""

    log_prob: Float[Tensor, "R C"]
    ids: Int[Tensor, "R C"]


class Limits(NamedTuple):
    """What is the same in all steps. room: most tokens of each source of the batch. longest: the length penalty of so
    many. divisors: that of each length. eos: the token that ends. n_best: hypotheses wanted a source."""

    room: Int[Tensor, "B"]
    longest: Float[Tensor, "B"]
    divisors: Float[Tensor, "capacity"]
    eos: int
    n_best: int


class Advanced(NamedTuple):
    """live: the places after one more token, empty in sources that are done. parent: the place that each came from (its
    own, where it is empty). done: whether nothing of a source can come among its n best any more. shared: tokens, BOS
    included, that all places of each source had in common before."""

    live: Live
    parent: Int[Tensor, "n size"]
    done: Bool[Tensor, "n"]
    shared: int


Penalise = Callable[[Live, Int[Tensor, "n size"]], Float[Tensor, "n size"]]
"""What is added to the score of each place, from the places after a step and those that they came from."""


def advance(
    live: Live, ended: Ended, found: Tokens, step: int, limits: Limits, penalty: Penalise | None = None
) -> Advanced:
    """The places after one more token, those that end moved to `ended`. The live ones passed in are spent."""
    if penalty is None and (library := _library(live, found)) is not None:
        return _compiled(library, live, ended, found, step, limits)
    shared = live.shared(step)
    live, parent = _grow(live, found, step)
    ends = (live.tokens[:, :, step] == limits.eos) | (step + 1 >= limits.room[live.source])[:, None]
    ends &= live.log_prob > -torch.inf
    if bool(ends.any()):
        ended.add(
            live, ends, step + 1, float(limits.divisors[step]), None if penalty is None else penalty(live, parent)
        )
        live = live._replace(log_prob=live.log_prob.masked_fill(ends, -torch.inf), taken=live.taken + ends.sum(1))
    kept = ended.score[live.source].topk(limits.n_best).values[:, -1]
    done = kept >= live.log_prob.amax(1) / limits.longest[live.source]
    return Advanced(live._replace(log_prob=live.log_prob.masked_fill(done[:, None], -torch.inf)), parent, done, shared)


def _grow(live: Live, found: Tokens, step: int) -> tuple[Live, Int[Tensor, "n size"]]:
    n, size = live.log_prob.shape
    log_probs, ids = (each.unflatten(0, (n, -1)).expand(-1, size, -1) for each in found)
    choices = log_probs.shape[2]
    total = (live.log_prob[:, :, None] + log_probs).flatten(1)
    total, order = total.sort(dim=1, descending=True, stable=True)
    total, order = total[:, :size], order[:, :size]
    place = torch.arange(size, device=total.device)
    total = total.masked_fill(place >= (size - live.taken)[:, None], -torch.inf)
    parent = torch.where(total > -torch.inf, order // choices, place)
    tokens = live.tokens.gather(1, parent[:, :, None].expand_as(live.tokens))
    tokens[:, :, step] = ids.flatten(1).gather(1, order)
    lineage = live.lineage.gather(1, parent[:, :, None].expand_as(live.lineage))
    lineage[:, :, step] = place.to(lineage.dtype)
    return live._replace(log_prob=total, tokens=tokens, lineage=lineage), parent


class _Live(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64), ("size", ctypes.c_int64), ("capacity", ctypes.c_int64), ("source", ctypes.c_void_p),
        ("log_prob", ctypes.c_void_p), ("tokens", ctypes.c_void_p), ("taken", ctypes.c_void_p),
        ("lineage", ctypes.c_void_p),
    )  # fmt: skip


class _Ended(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("score", "log_prob", "length", "tokens"))


class _Found(ctypes.Structure):
    _fields_ = (
        ("log_prob", ctypes.c_void_p), ("ids", ctypes.c_void_p), ("places", ctypes.c_int64),
        ("choices", ctypes.c_int64),
    )  # fmt: skip


class _Limits(ctypes.Structure):
    _fields_ = (
        ("room", ctypes.c_void_p), ("longest", ctypes.c_void_p), ("divisor", ctypes.c_double),
        ("step", ctypes.c_int64), ("eos", ctypes.c_int64), ("n_best", ctypes.c_int64),
    )  # fmt: skip


def _library(live: Live, found: Tokens) -> Any:
    """The compiled code, where it takes these."""
    if live.log_prob.device.type != "cpu" or live.log_prob.dtype != torch.float64:
        return None
    if found.log_prob.dtype != torch.float32 or not found.log_prob.numel():
        return None
    if len(found.ids) not in (len(live.source), live.log_prob.numel()) or found.ids.shape != found.log_prob.shape:
        return None
    return native.load(_SOURCE) if native.readable(*live, *found) else None


def _compiled(library: Any, live: Live, ended: Ended, found: Tokens, step: int, limits: Limits) -> Advanced:
    """The same in place."""
    live, found = Live(*(each.contiguous() for each in live)), Tokens(*(each.contiguous() for each in found))
    n, size = live.log_prob.shape
    parent = torch.empty(n, size, dtype=torch.int64, device="cpu")
    done = torch.empty(n, dtype=torch.bool, device="cpu")
    rows, choices = found.ids.shape
    given = (
        _Live(n, size, live.tokens.shape[2], *(each.data_ptr() for each in live)),
        _Ended(*(each.data_ptr() for each in (ended.score, ended.log_prob, ended.length, ended.tokens))),
        _Found(*(each.data_ptr() for each in found), rows // n, choices),
        _Limits(
            limits.room.data_ptr(), limits.longest.data_ptr(), float(limits.divisors[step]), step, limits.eos,
            limits.n_best,
        ),
    )  # fmt: skip
    run: Any = library.attnbench_advance
    run.restype = ctypes.c_int64
    shared = run(*map(ctypes.byref, given), native.at(parent), native.at(done), torch.get_num_threads())
    return Advanced(live, parent, done, 1 + shared)
