"""Beam search over any model that can step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from attnbench.attention.history import last_position
from attnbench.core.registry import MemberError
from attnbench.core.tree import closed_up, select_batch
from attnbench.models.base import Seq2SeqModel, Source
from attnbench.search.base import Hypothesis, SearchSpec, SpecialIds, accumulator, searches
from attnbench.search.candidates import top_tokens
from attnbench.search.coverage_penalty import CoveragePenaltyField, CoveragePenaltySpec
from attnbench.search.length_penalty import AveragePenalty, LengthPenaltyField
from attnbench.search.places import Ended, Limits, Live, Tokens, advance


@searches.register
class BeamSpec(SearchSpec):
    """Beam search: the `size` likeliest beginnings at every step, the ended ones ranked by the length penalty."""

    kind: Literal["beam"] = "beam"
    size: int = Field(default=5, ge=1, le=10_000)
    """Places in the beam."""
    penalty: LengthPenaltyField = AveragePenalty()
    """Length penalty: none, avg or wu."""
    coverage: CoveragePenaltyField | None = None
    """Coverage penalty, added to the score of ended hypotheses; null: none."""
    n_best: int = Field(default=1, ge=1)
    """Hypotheses returned a source, at most `size`."""

    @model_validator(mode="after")
    def _n_best_fits(self) -> Self:
        if self.n_best > self.size:
            raise ValueError(
                f"n_best ({self.n_best}) is larger than the beam (size {self.size}); raise size or lower n_best"
            )
        return self

    @model_validator(mode="after")
    def _penalties_fit(self) -> Self:
        """Said before a training, which would end with a search that cannot be made."""
        lengths = torch.arange(1, 4)
        _require_shape(self.penalty, "divisor", self.penalty.divisor(lengths), lengths.shape)
        if self.coverage is not None:
            given = self.coverage.penalty(torch.ones(1, 2, 3), torch.ones(1, 3, dtype=torch.bool))
            _require_shape(self.coverage, "penalty", given, (1, 2))
        return self

    @property
    def places(self) -> int:
        return self.size

    @property
    def outputs(self) -> int:
        return self.n_best

    @property
    def asks_received(self) -> bool:
        return self.coverage is not None

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.size == 1:
            for name in ("penalty", "coverage"):
                if self.is_set(name):
                    yield name, "a beam of size 1 has nothing to rank"

    def build(self) -> Beam:
        return Beam(self)


def _require_shape(member: object, method: str, found: Tensor, wanted: tuple[int, ...]) -> None:
    if found.shape != wanted:
        raise MemberError(
            f"{type(member).__name__}.{method} gives a tensor of shape {tuple(found.shape)} where {tuple(wanted)} is "
            "asked for; mend it"
        )


class Beam:
    """The beam has `size` places a source. Each step fills them with the likeliest one-token continuations of what
    stands in them; one that ends (EOS, or the length limit) leaves and takes its place with it, so that a beam of
    size 1 is greedy search under every penalty, and a source has at most `size` ended hypotheses
    (Sutskever et al. 2014, section 3.2, with a beam that narrows).

    Equal candidates: the better-placed parent first, then the lower id. Ended by EOS ranks before cut by the limit,
    then the higher score, then the sooner ended.

    A source is done when no place is left or none of those still growing can come among its n best: its
    log-probability over the penalty of the longest output allowed is not above the n-th best score so far.
    Stopping there never changes the answer: a coverage penalty can only lower a score.
    """

    def __init__(self, spec: BeamSpec) -> None:
        self.spec = spec

    @torch.no_grad()
    def __call__(self, model: Seq2SeqModel, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
        rows, device = source.valid.shape[0], source.valid.device
        if not rows:
            return []
        size, dtype = self.spec.size, accumulator(device)
        room = self.spec.room(source, model.max_length)
        capacity = int(room.max())
        divisors = self.spec.penalty.divisor(torch.arange(1, capacity + 1))
        limits = Limits(room, divisors.to(device, dtype)[room - 1], divisors, special.eos, self.spec.n_best)

        coverage = self.spec.coverage
        words = source.valid & ~last_position(source.valid)
        memory = model.encode(source, need_weights="cross" if coverage is not None else False)
        state = model.start(memory, capacity, track=coverage is not None)
        ended = Ended(rows, size, capacity, dtype, device)
        live = Live(
            source=torch.arange(rows, device=device),
            log_prob=torch.full((rows, size), -torch.inf, dtype=dtype, device=device).index_fill_(
                1, torch.zeros(1, dtype=torch.long, device=device), 0.0
            ),
            tokens=torch.full((rows, size, capacity), special.pad, device=device),
            taken=torch.zeros(rows, dtype=torch.long, device=device),
            lineage=torch.zeros((rows, size, capacity), dtype=torch.int16, device=device),
        )
        last = torch.full((rows,), special.bos, device=device)
        for step in range(capacity):
            logits, state = model.step(memory, state, last)
            if not step:  # until here all places of a source are the same
                state = model.widen(state, size)
            found = Tokens(*top_tokens(logits, size, (special.pad, special.bos)))
            penalty = None if coverage is None else functools.partial(_penalty, coverage, model, state, words)
            live, parent, done, shared = advance(live, ended, found, step, limits, penalty)
            going = closed_up(~done)
            if not len(going):
                break
            if len(going) < len(done):
                live, parent = select_batch(live, going), parent[going]
                rows = (going[:, None] * size + parent).flatten()
                memory, state = model.keep(memory, state, going, rows, shared)
            else:
                state = _reorder(model, state, parent, shared)
            last = live.tokens[:, :, step].flatten()
        return ended.hypotheses(special.eos, self.spec.n_best)


def _reorder(model: Seq2SeqModel, state: Any, parent: Int[Tensor, "n size"], shared: int) -> Any:
    n, size = parent.shape
    place = torch.arange(size, device=parent.device)
    if bool((parent == place).all()):  # all late steps, often: the copy is the dear part
        return state
    rows = (torch.arange(n, device=parent.device)[:, None] * size + parent).flatten()
    return model.reorder(state, rows, shared)


def _penalty(
    coverage: CoveragePenaltySpec, model: Seq2SeqModel, state: Any, words: Bool[Tensor, "B S"], live: Live,
    parent: Int[Tensor, "n size"],
) -> Float[Tensor, "n size"]:  # fmt: skip
    received = model.received(state).unflatten(0, (-1, parent.shape[1]))
    return coverage.penalty(received, words[live.source]).gather(1, parent)
