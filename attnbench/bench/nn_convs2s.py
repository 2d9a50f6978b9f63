"""ConvS2S of torch's modules, as its users write it: padded rows, nn.Conv1d, attention by products of matrices."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import glu, pad

from attnbench.bench import nn_loop
from attnbench.data.base import PAD
from attnbench.models.base import ModelSpec, Sizes
from attnbench.models.convs2s import HALF, ConvS2SSpec


def serves(spec: ModelSpec) -> bool:
    """Whether such a model is written here: softmax of dot products with the states themselves."""
    if type(spec) is not ConvS2SSpec:
        return False
    site = spec.attention.cross
    plain = site.pattern.kind == "full" and site.bias is None and site.transform.kind == "softmax"
    return plain and site.module.kind == "single_head" and site.score.kind == "dot" and not spec.attention_dropout


class NNConvS2S(nn_loop.Model):
    """The model of the spec, number for number; only where this module `serves` it."""

    def __init__(self, spec: ConvS2SSpec, sizes: Sizes) -> None:
        super().__init__()
        inner, outer, layers = spec.embedding, spec.width, spec.decoder_layers or spec.layers
        self.kernel = spec.kernel
        self.source = nn.Embedding(sizes.source_vocab, inner)
        self.target = self.source if spec.tie == "all" else nn.Embedding(sizes.target_vocab, inner)
        self.source_position = nn.Embedding(spec.max_length, inner)
        self.target_position = nn.Embedding(spec.max_length, inner)
        self.dropout = nn.Dropout(spec.dropout)
        self.expand = nn.ModuleList(nn.Linear(inner, outer) for _ in range(2))
        self.contract = nn.ModuleList(nn.Linear(outer, inner) for _ in range(2))
        self.encoder = nn.ModuleList(nn.Conv1d(outer, 2 * outer, spec.kernel) for _ in range(spec.layers))
        self.decoder = nn.ModuleList(nn.Conv1d(outer, 2 * outer, spec.kernel) for _ in range(layers))
        attentions = 1 if spec.share_attention else layers
        self.query = nn.ModuleList(nn.Linear(outer, inner) for _ in range(attentions))
        self.context = nn.ModuleList(nn.Linear(inner, outer) for _ in range(attentions))
        self.output = nn.Linear(inner, sizes.target_vocab)
        if spec.tie != "none":
            self.output.weight = self.target.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        there = (source != PAD)[:, None]
        embedded = self._embed(source, self.source, self.source_position)
        states = self.expand[0](embedded).transpose(1, 2)
        around = (self.kernel - 1) // 2, self.kernel // 2
        for layer in self.encoder:
            states = (self._gate(layer, states.masked_fill(~there, 0.0), around) + states) * HALF
        keys = self.contract[0](states.transpose(1, 2))
        values = (keys + embedded) * HALF
        keys, scale = keys.transpose(1, 2), there.sum(2, keepdim=True).sqrt()
        embedded = self._embed(target, self.target, self.target_position)
        states = self.expand[1](embedded)
        for place, layer in enumerate(self.decoder):
            place %= len(self.query)
            gated = self._gate(layer, states.transpose(1, 2), (self.kernel - 1, 0)).transpose(1, 2)
            scores = (self.query[place](gated) + embedded) * HALF @ keys
            mixed = scores.masked_fill(~there, float("-inf")).softmax(2) @ values * scale
            states = ((self.context[place](mixed) + gated) * HALF + states) * HALF
        return self.output(self.dropout(self.contract[1](states)))

    def _embed(self, words: Tensor, table: nn.Embedding, positions: nn.Embedding) -> Tensor:
        return self.dropout(table(words) + positions.weight[: words.shape[1]])

    def _gate(self, layer: nn.Module, states: Tensor, around: tuple[int, int]) -> Tensor:
        return glu(layer(self.dropout(pad(states, around))), dim=1)
