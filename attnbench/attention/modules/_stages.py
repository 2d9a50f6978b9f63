"""The stages of attention that scores every key, as they are defined: score, bias, pattern, transform, dropout, mix."""

from __future__ import annotations

from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnbench.attention import cached
from attnbench.attention.history import remaining, unfold
from attnbench.attention.patterns.base import dense
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import ScoreTransform
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.types import Dims, History, Memory, Positions, Role
from attnbench.core.dropout import Dropout
from attnbench.core.seeding import drawn_apart
from attnbench.core.tree import expand_batch


class Stages(nn.Module):
    """The stages of the pipeline, built for queries and keys of the widths in `dims`, on each of its heads."""

    def __init__(self, site: Site, role: Role, dims: Dims, dropout: float) -> None:
        super().__init__()
        with drawn_apart("coverage"):
            self.coverage = None if site.coverage is None else site.coverage.build(dims)
        self.score = site.score.build(
            dims if self.coverage is None else dims._replace(feature_width=self.coverage.width)
        )
        self.bias = None if site.bias is None else site.bias.build(dims)
        self.transform = site.transform.build(dims)
        self.pattern, self.layer = site.pattern, dims.layer
        self.role: Role = role
        self.rule = None if site.pattern.drawn else site.pattern.mask_mod(role, dims.layer)
        self.keep = site.transform.keep(role)
        self.kept = None if self.keep is None else self.keep.mask_mod(role, dims.layer)
        if site.pattern.drawn:  # a buffer: weights that are loaded elsewhere bring their draw along
            self.register_buffer("draw", torch.tensor(torch.initial_seed() & 0x7FFFFFFF))
            self.draw: Tensor
        self.heads = dims.heads
        self.spends, self.bounded = site.spends, site.transform.needs_upper
        self.keeps_history = self.spends or self.coverage is not None
        self.dense_in_eval = site.sparsify == "train"
        self.dropout = Dropout(dropout)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.pattern.drawn and self.draw.is_cuda:  # it is read as a number, for which nobody shall wait
            self.draw = self.draw.cpu()
        return self

    def mix(
        self,
        queries: Float[Tensor, "B H Q E"],
        memory: Memory,
        positions: Positions,
        history: History | None = None,
        need_weights: bool = True,
    ) -> tuple[Float[Tensor, "B H Q E2"], Float[Tensor, "B H Q K"] | None, History | None]:
        """Context of each query, its weights before dropout, and the history with them, where one is kept.

        need_weights: False lets a fast path make the context, where there is one, without the weights.
        """
        keys, values = keys_and_values(memory)
        queries, keys = precise(queries, keys)
        if self.keeps_history and history is None:
            history = self._begin(queries, keys)
        feature = None
        if history is not None and history.feature is not None:
            feature = history.feature.view(queries.shape[0], queries.shape[2], *history.feature.shape[1:])
        scores, upper = self._score(queries, keys, feature), None
        if history is not None and self.spends:
            if memory.fertility is None:
                raise ValueError("the attention is bounded by fertilities, and the Memory holds none")
            upper = remaining(memory.fertility, history.spent)
        weights = self._weigh(scores, memory, positions, upper)
        if history is not None:
            history = self._extend(history, weights, queries, memory)
        return self._blend(weights, values), weights, history

    def _score(self, queries: Tensor, keys: Tensor, feature: Tensor | None = None) -> Float[Tensor, "... Q K"]:
        with torch.autocast(queries.device.type, enabled=False):
            return self.score(queries, keys) if feature is None else self.score(queries, keys, feature)

    def _weigh(
        self, scores: Float[Tensor, "B H Q K"], memory: Memory, positions: Positions, upper: Tensor | None = None
    ) -> Float[Tensor, "B H Q K"]:
        if self.bias is not None:
            scores = scores + self.bias(positions, upper)
        allowed, normalise = self._allowed(memory, positions), self._normaliser
        if normalise is softmax:
            return softmax(scores, valid=allowed)
        if self.bounded:
            return normalise(scores, valid=allowed, upper=upper)
        if self.kept is not None:
            return normalise(scores, valid=allowed, keep=dense(self.kept, positions))
        return normalise(scores, valid=allowed)

    def _blend(self, weights: Float[Tensor, "... K"], values: Float[Tensor, "... K E2"]) -> Tensor:
        return cached.blend(self.dropout(weights).to(values.dtype), values)

    @property
    def _normaliser(self) -> ScoreTransform:
        return softmax if self.dense_in_eval and not self.training else self.transform

    def _allowed(self, memory: Memory, positions: Positions) -> Bool[Tensor, "#B #H #Q K"] | None:
        allowed = None if memory.valid is None else memory.valid[:, None, None, :]
        rule, rows = self.rule, 1
        if self.pattern.drawn:
            lengths = self._lengths(memory, positions)
            rows = 1 if lengths is None else len(lengths)
            rule = self.pattern.mask_mod(self.role, self.layer, lengths=lengths, seed=self._seed)
        if rule is None:
            return allowed
        mask = dense(rule, positions, self.heads, rows)
        return mask if allowed is None else allowed & mask

    def _lengths(self, memory: Memory, positions: Positions) -> Int[Tensor, "#B"] | None:
        """How many keys each row has; None where a query looks back and the future does not count."""
        if self.role == "decoder_self":
            return None
        if memory.valid is None:
            return positions.k.new_tensor([len(positions.k)])
        return memory.valid.sum(1)

    @property
    def _seed(self) -> int:
        return int(self.draw) if self.pattern.drawn else 0

    def _begin(self, queries: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> History:
        """Nothing received yet."""
        rows, length = queries.shape[0] * queries.shape[2], keys.shape[2]
        spent = queries.new_zeros(rows, self.heads, length)
        feature = None if self.coverage is None else queries.new_zeros(rows, length, self.coverage.width)
        return History(spent, feature)

    def _extend(
        self, history: History, weights: Float[Tensor, "B H Q K"], queries: Float[Tensor, "B H Q E"], memory: Memory
    ) -> History:
        received, feature = unfold(weights), None
        if self.coverage is not None and history.feature is not None:
            asked = unfold(queries).flatten(1)  # one head: modules with more take no coverage
            kept = None if memory.coverage is None else expand_batch(memory.coverage, queries.shape[2])
            with torch.autocast(queries.device.type, enabled=False):
                feature = self.coverage(history.feature, received[:, 0], asked, kept)
            if memory.valid is not None:  # padding stays at 0
                valid = expand_batch(memory.valid, queries.shape[2])
                feature = feature.masked_fill(~valid.unsqueeze(-1), 0.0)
        return History(history.spent + received, feature)


def blank(states: Float[Tensor, "B K D"], valid: Bool[Tensor, "B K"] | None) -> Float[Tensor, "B K D"]:
    """The states with 0 where they are masked: one may hold anything, NaN too, and weight 0 times NaN is NaN."""
    if valid is None or _all_valid(valid):
        return states
    return torch.where(valid.unsqueeze(-1), states, 0.0)


def _all_valid(valid: Bool[Tensor, "B K"]) -> bool:
    """Whether that is so, where it can be told without waiting: an update never waits, nor does anything for a GPU."""
    return not torch.is_grad_enabled() and valid.device.type == "cpu" and bool(valid.all())


def keys_and_values(memory: Memory) -> tuple[Float[Tensor, "B H K E"], Float[Tensor, "B H K E2"]]:
    """Keys and values, of a cache those that are there."""
    assert memory.keys is not None  # the modules that score make Memories with keys
    end = memory.filled
    return (memory.keys, memory.values) if end is None else (memory.keys[:, :, :end], memory.values[:, :, :end])


def precise(queries: Float[Tensor, "B H Q E"], keys: Float[Tensor, "B H K E"]) -> tuple[Tensor, Tensor]:
    """What scores are made of: by rows, or each product copies them anew, and in float32 at least, since ties of low
    precision would let top-k keep too many."""
    queries = queries.contiguous()
    low = min(queries.dtype.itemsize, keys.dtype.itemsize) < 4
    return (queries.float(), keys.float()) if low else (queries, keys)
