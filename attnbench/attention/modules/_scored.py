"""What modules that score every key share: score, pattern, transform, dropout and mixing."""

from __future__ import annotations

import functools
from typing import Any, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnbench.attention.backends import banded, chunked, few, flex, fused, picked, sdpa
from attnbench.attention.backends.base import choose
from attnbench.attention.history import remaining, unfold
from attnbench.attention.patterns.base import Layout, dense
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import Fused, ScoreTransform
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.types import Dims, History, Memory, Positions, Role
from attnbench.core.dropout import Dropout
from attnbench.core.seeding import drawn_apart
from attnbench.core.tree import expand_batch

_Kernel = Literal["few", "flex", "sdpa", "triton"]
"""What multiplies queries and keys itself."""


class Scored(nn.Module):
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
        kept = site.transform.keep(role)
        self.kept = None if kept is None else kept.mask_mod(role, dims.layer)
        if site.pattern.drawn:  # a buffer: weights that are loaded elsewhere bring their draw along
            self.register_buffer("draw", torch.tensor(torch.initial_seed() & 0x7FFFFFFF))
            self.draw: Tensor
        self.choice = choose(site, role, dropout)
        self.kernel = site.transform.fused
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

    def mix(
        self,
        queries: Float[Tensor, "B H Q E"],
        memory: Memory,
        positions: Positions,
        history: History | None = None,
        need_weights: bool = True,
    ) -> tuple[Float[Tensor, "B H Q E2"], Float[Tensor, "B H Q K"] | None, History | None]:
        """Context of each query, its weights before dropout, and the history with them, where one is kept.

        need_weights: False leaves the weights out where a fast path makes the context without them.
        """
        keys, values = memory.keys, memory.values
        assert keys is not None  # the modules that score make Memories with keys
        if memory.filled is not None:
            keys, values = keys[:, :, : memory.filled], values[:, :, : memory.filled]
        kernel = None if need_weights else self._kernel_for(queries, keys, values, memory, positions)
        if kernel is not None:
            return self._by_kernel(kernel, queries, keys, values, memory), None, None
        own = None if need_weights else self._own_keys(memory, positions)
        if own is not None:
            return self._step(queries, keys, values, own), None, None
        queries = queries.contiguous()  # or each product copies them anew
        if min(queries.dtype.itemsize, keys.dtype.itemsize) < 4:  # ties of low precision would let top-k keep too many
            queries, keys = queries.float(), keys.float()
        if not need_weights and not self.keeps_history:
            layout = self._layout(memory, positions)
            if layout is not None:
                return self._banded(queries, keys, values, memory, layout), None, None
            if chunked.needed(queries, positions):

                def answer(some: Tensor, at: Positions) -> Tensor:
                    weights = self._weigh(self._score(some, keys), memory, at)
                    return self._blend(weights, values)

                draws = self.training and self.dropout.p > 0
                return chunked.attend(queries, positions, answer, draws=draws), None, None
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
        return few.blend(self.dropout(weights).to(values.dtype), values)

    @property
    def _normaliser(self) -> ScoreTransform:
        return softmax if self.dense_in_eval and not self.training else self.transform

    def _kernel_for(
        self, queries: Tensor, keys: Tensor, values: Tensor, memory: Memory, positions: Positions
    ) -> _Kernel | None:
        """The kernels that multiply queries and keys themselves and take this call."""
        backend = self.choice.backend
        if self.choice.gpu == "flex":
            right_padded = memory.valid is None or memory.right_padded
            return "flex" if flex.pays(queries, len(positions.k), right_padded) else None
        if self.choice.gpu is not None and queries.is_cuda:
            gpu = "sdpa" if self._normaliser is softmax else self.choice.gpu
            backend = gpu if gpu == "sdpa" or fused.compiles(queries.device) else backend
        elif self.choice.gpu is not None and self._is_step(positions):
            return "few" if few.serves(queries, keys, values, self._fused) else None
        if backend == "sdpa":
            return backend
        if backend == "triton":
            fits = max(queries.shape[-1], values.shape[-1]) <= fused.WIDEST and queries.dtype != torch.float64
            return backend if fits else None
        full = len(positions.q) == len(positions.k) > 1
        return backend if backend == "flex" and full and queries.shape[-1] >= flex.NARROWEST else None

    def _is_step(self, positions: Positions) -> bool:
        """Whether each query sees all keys, a few at most answer, and no weight is dropped."""
        if (self.training and self.dropout.p) or len(positions.q) > few.MOST:
            return False
        if self.role != "decoder_self" or not len(positions.q) or not len(positions.k):
            return True
        return bool(positions.k[-1] <= positions.q[0])

    def _own_keys(self, memory: Memory, positions: Positions) -> picked.Picked | None:
        """The keys that the pattern gives to a step, where it can be made of them alone."""
        keys, valid = memory.keys, memory.valid
        if not self.choice.picks or keys is None or not keys.numel() or keys.device.type != "cpu":  # no GPU waits
            return None
        count = len(positions.q)
        if not count or (count > 1 and (self.role != "cross" or bool((positions.q != positions.q[0]).any()))):
            return None
        at = int(positions.q[0])
        if self.role == "cross":
            return self.own_of_sources(at, picked.sources(len(keys), keys.shape[2], valid))
        filled = keys.shape[2] if memory.filled is None else memory.filled
        if valid is not None or not filled == len(positions.k) == at + 1 or int(positions.k[-1]) != at:
            return None
        return self.own_of_cache(at)

    def _step(self, queries: Float[Tensor, "B H Q E"], keys: Tensor, values: Tensor, own: picked.Picked) -> Tensor:
        """Contexts over the keys that were picked."""
        transform, scale = self._known, self.score.scale
        dropped, there = self.training and self.dropout.p, own.there
        if transform is not None and scale is not None and not dropped and few.serves(queries, keys, values, transform):
            attend = functools.partial(few.attend, queries, scale=scale, transform=transform, valid=there)
            if isinstance(own.keys, slice):
                return attend(picked.take(keys, own.keys), picked.take(values, own.keys))
            return attend(keys, values, listed=own.keys)
        keys, values = picked.take(keys, own.keys), picked.take(values, own.keys)
        if min(queries.dtype.itemsize, keys.dtype.itemsize) < 4:
            queries, keys = queries.float(), keys.float()
        return self._blend(self._normaliser(self._score(queries, keys), valid=there), values)

    @property
    def _known(self) -> Fused | None:
        """The transform as kernels know it; None where they do not."""
        return Fused("softmax") if self._normaliser is softmax else self.kernel(self.transform)

    @property
    def _fused(self) -> Fused:
        """The same, of a site for whose transform there are kernels."""
        transform = self._known
        assert transform is not None  # or the backend would not have been chosen
        return transform

    @property
    def few_transform(self) -> Fused | None:
        """The transform of steps on a processor that few.py answers; None where it answers none of them."""
        transform = self._known
        served = self.choice.picks or self.choice.gpu in ("sdpa", "triton")
        if not served or (self.training and self.dropout.p):
            return None
        if transform is None or self.score.scale is None or not few.compiled():
            return None
        return transform if few.knows(transform) else None

    def own_of_cache(self, at: int) -> picked.Picked | None:
        """The keys of a cache that position `at` sees; None where they are not as many for all heads."""
        if not self.choice.picks:
            return picked.Picked(slice(0, at + 1))
        return picked.of_cache(self.pattern, self.layer, self._seed, self.heads, at)  # pyright: ignore[reportArgumentType] - frozen

    def own_of_sources(self, at: int, given: picked.Sources) -> picked.Picked:
        """The keys of each source that target position `at` sees; only where the site picks them."""
        return picked.of_sources(self.pattern, self.layer, self._seed, self.heads, at, given)

    @property
    def _seed(self) -> int:
        return int(self.draw) if self.pattern.drawn else 0

    def _by_kernel(
        self, kernel: _Kernel, queries: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Float[Tensor, "B H Q E2"]:
        scale, causal = self.score.scale, self.role == "decoder_self"
        assert scale is not None  # or the backend would not have been chosen
        if kernel == "few":
            valid = None if memory.valid is None else memory.valid[:, None, None, :]
            return few.attend(queries, keys, values, scale=scale, transform=self._fused, valid=valid)
        if kernel == "flex":
            return flex.attend(queries, keys, values, rule=self.rule, scale=scale, valid=memory.valid)
        rate = self.dropout.p if self.training else 0.0
        attend = functools.partial(fused.attend, transform=self._fused) if kernel == "triton" else sdpa.attend
        return attend(queries, keys, values, scale=scale, valid=memory.valid, causal=causal, dropout=rate)

    def _layout(self, memory: Memory, positions: Positions) -> Layout | None:
        """The pattern's own keys, where a full pass over them pays; None: all scores are made."""
        length = len(positions.k)
        if self.choice.backend != "banded" or len(positions.q) != length or length < self.choice.since:
            return None
        lengths = self._lengths(memory, positions) if self.pattern.drawn else None
        return self.pattern.layout(self.role, self.layer, lengths=lengths, seed=self._seed)

    def _banded(
        self, queries: Tensor, keys: Tensor, values: Tensor, memory: Memory, layout: Layout
    ) -> Float[Tensor, "B H Q E2"]:
        def weigh(scores: Tensor, allowed: Tensor) -> Tensor:
            return self.dropout(self._normaliser(scores, valid=allowed)).to(values.dtype)

        return banded.attend(
            queries, keys, values,
            score=self._score, weigh=weigh, layout=layout, valid=memory.valid, causal=self.role == "decoder_self",
        )  # fmt: skip

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
