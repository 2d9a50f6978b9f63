"""Greedy search: the likeliest token at every step."""

from __future__ import annotations

from typing import Literal

import torch

from attnbench.core.tree import closed_up
from attnbench.models.base import Seq2SeqModel, Source
from attnbench.search.base import DEAD_END, Hypothesis, SearchSpec, SpecialIds, accumulator, searches
from attnbench.search.candidates import top_tokens


@searches.register
class GreedySpec(SearchSpec):
    """The likeliest token at every step; equal ones: the lowest id."""

    kind: Literal["greedy"] = "greedy"

    def build(self) -> Greedy:
        return Greedy(self)


class Greedy:
    """One hypothesis a source; its score is its log-probability. A sentence leaves the batch when it ends."""

    def __init__(self, spec: GreedySpec) -> None:
        self.spec = spec

    @torch.no_grad()
    def __call__(self, model: Seq2SeqModel, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
        rows, device = source.valid.shape[0], source.valid.device
        if not rows:
            return []
        room = self.spec.room(source, model.max_length)
        soonest, capacity = int(room.min()), int(room.max())
        memory = model.encode(source)
        state = model.start(memory, capacity)

        tokens = torch.full((rows, capacity), special.pad, device=device)  # of every source, ended or not
        log_prob = torch.zeros(rows, dtype=accumulator(device), device=device)
        active = torch.arange(rows, device=device)  # the sources that the model's rows stand for
        last = torch.full((rows,), special.bos, device=device)
        for step in range(capacity):
            logits, state = model.step(memory, state, last)
            best, token = top_tokens(logits, 1, (special.pad, special.bos))
            last, best = token[:, 0], best[:, 0]
            # with a slice a step of one source spends a fifth less here
            some = slice(None) if len(active) == rows else active
            tokens[some, step] = last
            log_prob[some] += best
            done = (last == special.eos) | (best == -torch.inf)
            if step + 1 >= soonest:
                done |= step + 1 >= room[some]
            if bool(done.any()):
                going = closed_up(~done)
                if not len(going):
                    break
                active, last = active[going], last[going]
                memory, state = model.keep(memory, state, going, going)
        return [
            [_hypothesis(row[:limit], total, special.eos)]
            for row, limit, total in zip(tokens.tolist(), room.tolist(), log_prob.tolist(), strict=True)
        ]


def _hypothesis(row: list[int], log_prob: float, eos: int) -> Hypothesis:
    if log_prob == -torch.inf:
        return DEAD_END
    finished = eos in row
    return Hypothesis(row[: row.index(eos)] if finished else row, log_prob, log_prob, finished)
