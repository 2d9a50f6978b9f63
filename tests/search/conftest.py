"""A toy model whose every probability depends on the source and on all tokens so far, and plain searches over it."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from attnbench.core.tree import expand_batch
from attnbench.models.base import Decoded, Seq2SeqModel, Source
from attnbench.search.base import SpecialIds

PAD, BOS, EOS = 0, 1, 2
ROWS = 997


class ToyMemory(NamedTuple):
    key: torch.Tensor


class ToyState(NamedTuple):
    key: torch.Tensor  # of the source and the tokens so far
    source: torch.Tensor
    length: int
    beams: int


class Toy(Seq2SeqModel):
    """Logits are a row of a table, picked by a hash of the source's valid tokens and the prefix.

    step() fails where the rows of State and Memory do not belong together; `seen` has the (sources, rows) of each step.
    """

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table)
        self.seen = []

    def encode(self, source, *, need_weights=False):
        key = torch.zeros(len(source.data), dtype=torch.long)
        for token, valid in zip(source.data.T, source.valid.T, strict=True):
            key = torch.where(valid, (key * 31 + token + 7) % ROWS, key)
        return ToyMemory(key)

    def decode(self, memory, target_in, *, valid=None, need_weights=False):
        key, keys = memory.key, []
        for token in target_in.T:
            key = (key * 31 + token + 1) % ROWS
            keys.append(key)
        return Decoded(torch.stack(keys, 1).unsqueeze(-1))

    def logits(self, hidden):
        return self.table[hidden.squeeze(-1)]

    def start(self, memory, capacity, *, track=False):
        return ToyState(memory.key, memory.key, 0, 1)

    def step(self, memory, state, token):
        assert torch.equal(state.source, expand_batch(memory.key, state.beams)), "Memory and State went separate ways"
        self.seen.append((len(memory.key), len(token)))
        key = (state.key * 31 + token + 1) % ROWS
        return self.table[key], ToyState(key, state.source, state.length + 1, state.beams)


def toy(seed=0, vocabulary=6, eos=0.0, round_to=None):
    """eos: added to the logit of EOS. round_to: logits are multiples of it, so that ties are common."""
    table = 2 * torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table[:, EOS] += eos
    return Toy(table if round_to is None else (table / round_to).round() * round_to)


def sources(*lengths, seed=0, pad_to=0):
    width = max([*lengths, pad_to])
    data = torch.randint(3, 50, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return Source(data * valid, valid)


def alone(source, row, length):
    """The source of one row without its padding."""
    return Source(source.data[row : row + 1, :length], source.valid[row : row + 1, :length])


def rescore(model, source, hypothesis):
    """Summed log-probability of a hypothesis, from decode()."""
    tokens = torch.tensor([[BOS, *hypothesis.tokens, EOS]])
    if not hypothesis.finished:
        tokens = tokens[:, :-1]
    log_probs = model.logits(model.decode(model.encode(source), tokens[:, :-1]).hidden).log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None]).sum().item()


def next_log_probs(model, source, prefix):
    decoded = model.decode(model.encode(source), torch.tensor([[BOS, *prefix]]))
    log_probs = model.logits(decoded.hidden)[0, -1].log_softmax(-1)
    return {token: value for token, value in enumerate(log_probs.tolist()) if token not in (PAD, BOS)}


def plain_beam(model, source, room, size, penalty):
    """The rule of the beam in lists, one source, to the limit: [(tokens, log_prob, score, finished)], best first."""
    live, ended = [([], 0.0)], []
    for length in range(1, room + 1):
        grown = [
            (tokens, token, log_prob + more)
            for tokens, log_prob in live
            for token, more in sorted(next_log_probs(model, source, tokens).items(), key=lambda item: -item[1])[:size]
        ]
        grown.sort(key=lambda item: -item[2])
        live = []
        for tokens, token, log_prob in grown[: size - len(ended)]:
            score = log_prob / penalty(length)
            if token == EOS:
                ended.append((tokens, log_prob, score, True))
            elif length == room:
                ended.append(([*tokens, token], log_prob, score, False))
            else:
                live.append(([*tokens, token], log_prob))
    return sorted(ended, key=lambda item: (not item[3], -item[2]))


def everything(model, source, room, penalty, vocabulary):
    """Every output up to the limit, scored by decode(), best first: brute force."""
    found = []
    for length in range(room + 1):
        for tokens in product(range(3, vocabulary), repeat=length):
            finished = length < room
            hypothesis = SimpleNamespace(tokens=list(tokens), finished=finished)
            log_prob = rescore(model, source, hypothesis)
            found.append((list(tokens), log_prob, log_prob / penalty(length + finished), finished))
    return sorted(found, key=lambda item: (not item[3], -item[2]))


@pytest.fixture(scope="session")
def lab():
    """The names above, for test modules."""
    return SimpleNamespace(
        toy=toy,
        Toy=Toy,
        sources=sources,
        alone=alone,
        rescore=rescore,
        plain_beam=plain_beam,
        everything=everything,
        special=SpecialIds(bos=BOS, eos=EOS, pad=PAD),
    )
