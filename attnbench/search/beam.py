"""Beam search over any model that can step."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from attnbench.attention.history import last as last_position
from attnbench.core.tree import select_batch
from attnbench.models.base import Seq2SeqModel, Source
from attnbench.search.base import DEAD_END, Hypothesis, SearchSpec, SpecialIds, accumulator, searches
from attnbench.search.candidates import top_tokens
from attnbench.search.coverage import CoveragePenaltyField
from attnbench.search.penalties import AveragePenalty, PenaltyField


@searches.register
class BeamSpec(SearchSpec):
    """Beam search: the `size` likeliest beginnings at every step, the ended ones ranked by the length penalty."""

    kind: Literal["beam"] = "beam"
    size: int = Field(default=5, ge=1)
    """Places in the beam."""
    penalty: PenaltyField = AveragePenalty()
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

    def build(self) -> Beam:
        return Beam(self)


class _Live(NamedTuple):
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
        """How many tokens, BOS included, all places of each source have in common that something may still come from
        or go to."""
        if not step:
            return 1
        before = self.lineage[:, :, :step]
        place = torch.arange(before.shape[1], device=before.device)
        lost = (place >= (before.shape[1] - self.taken)[:, None]) & (self.log_prob == -torch.inf)
        same = ((before == before[:, :1]) | lost[:, :, None]).all(1)
        return 1 + int(same.to(torch.int32).cumprod(1).sum(1).min())


class _Ended:
    """The hypotheses that ended, in a table of `size` places a source of the batch, filled in the order of ending."""

    def __init__(self, rows: int, size: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.score = torch.full((rows, size), -torch.inf, dtype=dtype, device=device)
        self.log_prob = torch.full((rows, size), -torch.inf, dtype=dtype, device=device)
        self.length = torch.zeros((rows, size), dtype=torch.long, device=device)
        self.tokens = torch.zeros((rows, size, capacity), dtype=torch.long, device=device)

    def add(
        self,
        live: _Live,
        ends: Bool[Tensor, "n size"],
        length: int,
        divisor: float,
        bonus: Float[Tensor, "n size"] | None,
    ) -> None:
        row, place = ends.nonzero(as_tuple=True)
        into = live.source[row], (live.taken[:, None] + ends.cumsum(1) - 1)[row, place]
        log_prob = live.log_prob[row, place]
        self.log_prob[into] = log_prob
        self.score[into] = log_prob / divisor + (0.0 if bonus is None else bonus[row, place].to(log_prob.dtype))
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
        longest = divisors.to(device, dtype)[room - 1]

        coverage = self.spec.coverage
        words = source.valid & ~last_position(source.valid)
        memory = model.encode(source, need_weights="cross" if coverage is not None else False)
        state = model.start(memory, capacity, track=coverage is not None)
        ended = _Ended(rows, size, capacity, dtype, device)
        live = _Live(
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
            shared = live.shared(step)
            live, parent = _grow(live, logits, step, special)
            ends = (live.tokens[:, :, step] == special.eos) | (step + 1 >= room[live.source])[:, None]
            ends &= live.log_prob > -torch.inf
            if bool(ends.any()):
                bonus = None
                if coverage is not None:
                    received = model.received(state).unflatten(0, (-1, size))
                    bonus = coverage.bonus(received, words[live.source]).gather(1, parent)
                ended.add(live, ends, step + 1, float(divisors[step]), bonus)
                live = live._replace(
                    log_prob=live.log_prob.masked_fill(ends, -torch.inf), taken=live.taken + ends.sum(1)
                )
            kept = ended.score[live.source].topk(self.spec.n_best).values[:, -1]
            done = kept >= live.log_prob.amax(1) / longest[live.source]
            live = live._replace(log_prob=live.log_prob.masked_fill(done[:, None], -torch.inf))
            going = (~done).nonzero().squeeze(1)
            if not len(going):
                break
            if len(going) < len(done):
                live, parent, memory = select_batch(live, going), parent[going], select_batch(memory, going)
                state = select_batch(state, (going[:, None] * size + parent).flatten())
            else:
                state = _reorder(model, state, parent, shared)
            last = live.tokens[:, :, step].flatten()
        return ended.hypotheses(special.eos, self.spec.n_best)


def _grow(
    live: _Live, logits: Float[Tensor, "R V"], step: int, special: SpecialIds
) -> tuple[_Live, Int[Tensor, "n size"]]:
    """The places after one more token, and the place that each came from (its own, where it is empty).

    logits: of each place, or of each source where its places are the same.
    """
    n, size = live.log_prob.shape
    log_probs, ids = (
        each.unflatten(0, (n, -1)).expand(-1, size, -1) for each in top_tokens(logits, size, (special.pad, special.bos))
    )
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


def _reorder(model: Seq2SeqModel, state: Any, parent: Int[Tensor, "n size"], shared: int) -> Any:
    n, size = parent.shape
    place = torch.arange(size, device=parent.device)
    if bool((parent == place).all()):  # all late steps, often: the copy is the dear part
        return state
    rows = (torch.arange(n, device=parent.device)[:, None] * size + parent).flatten()
    return model.reorder(state, rows, shared)
