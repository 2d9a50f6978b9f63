"""Encoder-decoders of torch's recurrent layers, with attention as their users write it: a loop over the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnbench.bench import nn_loop
from attnbench.data.base import PAD
from attnbench.models.base import ModelSpec, Sizes
from attnbench.models.gru import GruSpec
from attnbench.models.lstm import LstmSpec
from attnbench.models.recurrent import RecurrentSpec


def serves(spec: ModelSpec) -> bool:
    """Whether such a model is written here: without attention, or with softmax of an additive or bilinear score."""
    if not (type(spec) is LstmSpec or type(spec) is GruSpec) or spec.attention_dropout:
        return False
    site = spec.attention.cross
    if site.module.kind == "none":
        return spec.input_feeding == "none"
    if site.module.kind != "single_head" or site.score.kind not in ("additive", "bilinear"):
        return False
    plain = site.pattern.kind == "full" and site.bias is None and site.coverage is None
    return plain and site.transform.kind == "softmax" and getattr(site.score, "units", None) is None


class NNRecurrent(nn_loop.Model):
    """The model of the spec, number for number, in torch's modules; only where this module `serves` it."""

    def __init__(self, spec: RecurrentSpec, sizes: Sizes) -> None:
        super().__init__()
        width, embedding, layers = spec.width, spec.embedding_width, spec.layers
        lstm, attends = spec.cell is nn.LSTM, spec.attends
        context = spec.encoder_width if attends else 0
        layer: Any = spec.cell
        between = spec.dropout if layers > 1 else 0.0
        self.spec, self.states = spec, 2 if lstm else 1
        self.source = nn.Embedding(sizes.source_vocab, embedding, padding_idx=PAD)
        self.target = nn.Embedding(sizes.target_vocab, embedding, padding_idx=PAD)
        self.dropout = nn.Dropout(spec.dropout)
        self.encoder = layer(
            embedding, width, layers, batch_first=True, dropout=between, bidirectional=spec.bidirectional
        )
        bridges = self.states * layers if spec.bidirectional else 0
        self.bridges = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(bridges))
        additive = attends and spec.attention.cross.score.kind == "additive"
        self.key = nn.Linear(context, width, bias=additive) if attends else None
        self.query = nn.Linear(width, width, bias=False) if additive else None
        self.vector = nn.Linear(width, 1, bias=False) if additive else None
        fed = {"none": 0, "attentional": width, "context": context}[spec.input_feeding]
        self.fed_width = fed = context if spec.query == "previous" else fed
        if fed:
            cell: Any = nn.LSTMCell if lstm else nn.GRUCell
            self.cells = nn.ModuleList(cell(width if place else embedding + fed, width) for place in range(layers))
        else:
            self.decoder = layer(embedding, width, layers, batch_first=True, dropout=between)
        attentional = spec.readout == "attentional"
        self.attentional = nn.Linear(context + width, width) if attentional else None
        read = width + context + embedding if spec.readout == "concat" else width
        self.output = nn.Linear(read, sizes.target_vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        there = source != PAD
        memory, state = self._encode(source, there)
        keys = None if self.key is None else self.key(memory)
        embedded = self.dropout(self.target(target))
        if not self.fed_width:
            given = tuple(torch.stack(parts) for parts in zip(*state, strict=True))
            states, _ = self.decoder(embedded, given if self.states > 1 else given[0])
            contexts = [] if keys is None else [self._attend(states, memory, keys, there)]
            return self.output(self._read(states, contexts, embedded))
        fed, made = embedded.new_zeros(len(source), self.fed_width), []
        for word in embedded.unbind(1):
            if self.spec.query == "previous":
                fed = context = self._answer(state[-1][0], memory, keys, there)
                state = self._step(torch.cat([word, fed], 1), state)
            else:
                state = self._step(torch.cat([word, fed], 1), state)
                context = self._answer(state[-1][0], memory, keys, there)
            read = self._read(state[-1][0], [context], word)
            if self.spec.query == "current":
                fed = read if self.spec.input_feeding == "attentional" else context
            made.append(read)
        return self.output(torch.stack(made, 1))

    def _encode(self, source: Tensor, there: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """The states of the last layer, and what each decoder layer starts from."""
        packed = pack_padded_sequence(
            self.dropout(self.source(source)), there.sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        made, last = self.encoder(packed)
        states, _ = pad_packed_sequence(made, batch_first=True, total_length=source.shape[1])
        parts = last if self.states > 1 else (last,)
        if self.bridges:
            bridges = iter(self.bridges)
            pairs = [part.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) for part in parts]
            parts = [[torch.tanh(next(bridges)(layer)) for layer in pair] for pair in pairs]
        return states, list(zip(*parts, strict=True))

    def _step(self, given: Tensor, before: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        after = []
        for place, (cell, state) in enumerate(zip(self.cells, before, strict=True)):
            made = cell(self.dropout(given) if place else given, state if self.states > 1 else state[0])
            after.append(made if self.states > 1 else (made,))
            given = after[-1][0]
        return after

    def _answer(self, query: Tensor, memory: Tensor, keys: Any, there: Tensor) -> Tensor:
        """The context of one query a row."""
        return self._attend(query[:, None], memory, keys, there).squeeze(1)

    def _attend(self, queries: Tensor, memory: Tensor, keys: Tensor, there: Tensor) -> Tensor:
        if self.query is not None and self.vector is not None:
            scores = self.vector(torch.tanh(self.query(queries)[:, :, None] + keys[:, None])).squeeze(3)
        else:
            scores = queries @ keys.transpose(1, 2)
        return scores.masked_fill(~there[:, None], float("-inf")).softmax(2) @ memory

    def _read(self, states: Tensor, contexts: list[Tensor], embedded: Tensor) -> Tensor:
        if self.attentional is not None:
            return self.dropout(torch.tanh(self.attentional(torch.cat([*contexts, states], -1))))
        return torch.cat([states, *contexts, embedded], -1) if self.spec.readout == "concat" else states
