"""Attention that scores every key: by a fast path where one gives the same, else by its stages."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention import cached
from attnbench.attention.backends import banded, chunked, few, flex, fused, picked, sampled, sdpa
from attnbench.attention.backends.base import choose
from attnbench.attention.modules._stages import Stages, keys_and_values, precise
from attnbench.attention.patterns.base import Layout, dense
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import Fused
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.types import Dims, History, Memory, Positions, Role

_Kernel = Literal["few", "flex", "sdpa", "triton"]
"""What multiplies queries and keys itself."""


class Scored(Stages):
    """Stages, and the fast paths of backends/ that answer in their place where no weights are asked for."""

    def __init__(self, site: Site, role: Role, dims: Dims, dropout: float) -> None:
        super().__init__(site, role, dims, dropout)
        self.choice = choose(site, role, dropout)
        self.kernel = site.transform.fused

    def mix(
        self,
        queries: Float[Tensor, "B H Q E"],
        memory: Memory,
        positions: Positions,
        history: History | None = None,
        need_weights: bool = True,
    ) -> tuple[Float[Tensor, "B H Q E2"], Float[Tensor, "B H Q K"] | None, History | None]:
        context = None if need_weights else self._fast(queries, memory, positions)
        if context is None:
            return super().mix(queries, memory, positions, history, need_weights)
        return context, None, None

    def _fast(
        self, queries: Float[Tensor, "B H Q E"], memory: Memory, positions: Positions
    ) -> Float[Tensor, "B H Q E2"] | None:
        """The contexts by the first path that takes this call; None where none does."""
        keys, values = keys_and_values(memory)
        kernel = self._kernel_for(queries, keys, values, memory, positions)
        if kernel is not None:
            return self._by_kernel(kernel, queries, keys, values, memory, positions)
        own = self._own_keys(memory, positions)
        if own is not None:
            return self._step(queries, keys, values, own)
        if self.keeps_history:
            return None
        layout = self._layout(queries, keys, memory, positions)
        if layout is not None:
            return self._banded(*precise(queries, keys), values, memory, layout)
        if chunked.needed(queries, positions):
            return self._chunked(*precise(queries, keys), values, memory, positions)
        return None

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
        elif self.choice.few and queries.device.type == "cpu" and self._is_step(positions):
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
        if (self.training and self.dropout.p) or len(positions.q) > cached.MOST or torch.compiler.is_compiling():
            return False
        if self.role != "decoder_self" or not len(positions.q) or not len(positions.k):
            return True
        return bool(positions.k[-1] <= positions.q[0])

    def _by_kernel(
        self, kernel: _Kernel, queries: Tensor, keys: Tensor, values: Tensor, memory: Memory, positions: Positions
    ) -> Float[Tensor, "B H Q E2"]:
        scale, causal = self.score.scale, self.role == "decoder_self"
        assert scale is not None  # or the backend would not have been chosen
        if kernel == "few":
            valid, transform = None if memory.valid is None else memory.valid[:, None, None, :], self._fused
            if self.kept is not None:
                transform = transform._replace(keep=dense(self.kept, positions))
            return few.attend(queries, keys, values, scale=scale, transform=transform, valid=valid)
        if kernel == "flex":
            return flex.attend(queries, keys, values, rule=self.rule, scale=scale, valid=memory.valid)
        rate = self.dropout.p if self.training else 0.0
        attend = functools.partial(fused.attend, transform=self._fused) if kernel == "triton" else sdpa.attend
        return attend(queries, keys, values, scale=scale, valid=memory.valid, causal=causal, dropout=rate)

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
        return self._blend(self._normaliser(self._score(*precise(queries, keys)), valid=there), values)

    def _layout(self, queries: Tensor, keys: Tensor, memory: Memory, positions: Positions) -> Layout | None:
        """The pattern's own keys, where a full pass over them pays; None: all scores are made."""
        length, choice = len(positions.k), self.choice
        if choice.backend != "banded" or length < min(choice.since, choice.listed) or not self._is_whole(positions):
            return None
        if length < choice.since and not sampled.serves(queries, keys, memory.values):
            return None
        lengths = self._lengths(memory, positions) if self.pattern.drawn else None
        return self.pattern.layout(self.role, self.layer, lengths=lengths, seed=self._seed)

    def _is_whole(self, positions: Positions) -> bool:
        """Whether the queries stand at the positions from 0 on. Over a source only a processor is asked: on a GPU the
        answer would have to be waited for."""
        if self.role != "cross":
            return len(positions.q) == len(positions.k)
        q = positions.q
        return q.is_cpu and torch.equal(q, torch.arange(len(q), device=q.device))

    def _banded(
        self, queries: Tensor, keys: Tensor, values: Tensor, memory: Memory, layout: Layout
    ) -> Float[Tensor, "B H Q E2"]:
        def weigh(scores: Tensor, allowed: Tensor) -> Tensor:
            return self.dropout(self._normaliser(scores, valid=allowed)).to(values.dtype)

        return banded.attend(
            queries, keys, values,
            score=self._score, weigh=weigh, layout=layout, scale=self.score.scale, valid=memory.valid,
            causal=self.role == "decoder_self",
        )  # fmt: skip

    def _chunked(
        self, queries: Tensor, keys: Tensor, values: Tensor, memory: Memory, positions: Positions
    ) -> Float[Tensor, "B H Q E2"]:
        def answer(some: Tensor, at: Positions) -> Tensor:
            return self._blend(self._weigh(self._score(some, keys), memory, at), values)

        return chunked.attend(queries, positions, answer, draws=self.training and self.dropout.p > 0)

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
        """The transform of steps on a processor that few.py answers, but for what `keep_of_cache` brings; None where it
        answers none of them."""
        transform, served = self._known, self.choice.picks or self.choice.few
        if not served or (self.training and self.dropout.p):
            return None
        if transform is None or self.score.scale is None or not few.compiled():
            return None
        return transform if few.knows(transform) else None

    def keep_of_cache(self, at: int) -> Bool[Tensor, "1 1 1 K"] | None:
        """The keys of a cache that position `at` attends whatever their scores; None where the site keeps none so."""
        if self.keep is None:
            return None
        return picked.kept_of_cache(self.keep, self.layer, at)

    def own_of_cache(self, at: int) -> picked.Picked | None:
        """The keys of a cache that position `at` sees; None where they are not as many for all heads."""
        if not self.choice.picks:
            return picked.Picked(slice(0, at + 1))
        return picked.of_cache(self.pattern, self.layer, self._seed, self.heads, at)  # pyright: ignore[reportArgumentType] - frozen

    def own_of_sources(self, at: int, given: picked.Sources) -> picked.Picked:
        """The keys of each source that target position `at` sees; only where the site picks them."""
        return picked.of_sources(self.pattern, self.layer, self._seed, self.heads, at, given)
