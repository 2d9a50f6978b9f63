"""torch.nn.Transformer as its users train it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.bench import nn_loop, sentences
from attnbench.bench.subjects import fields_of
from attnbench.bench.timer import Case
from attnbench.data.base import PAD
from attnbench.models.transformer import TransformerSpec

SHIPPED = "torch.nn.Transformer, float32, as shipped"
SET_UP = "torch.nn.Transformer, float32"
"""With the products and the memory that every training here has."""
LONGEST = 128


class NNTransformer(nn_loop.Model):
    """Shared embeddings and learned positions; dropout as it has it, on the attention's weights too, but none within
    the feed-forward blocks."""

    def __init__(self, spec: TransformerSpec) -> None:
        super().__init__()
        self.scale = spec.width**0.5
        self.embedding = nn.Embedding(sentences.WORDS, spec.width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=spec.width**-0.5)
        self.position = nn.Embedding(LONGEST, spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        self.stacks = nn.Transformer(
            spec.width, spec.heads, spec.layers, spec.layers, spec.ffn, dropout=spec.dropout, batch_first=True
        )
        for layer in [*self.stacks.encoder.layers, *self.stacks.decoder.layers]:
            layer.dropout = nn.Identity()
        self.output = nn.Linear(spec.width, sentences.WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        states = self.stacks(
            self._embed(source), self._embed(target), tgt_mask=future, tgt_is_causal=True,
            src_key_padding_mask=source == PAD, tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )  # fmt: skip
        return self.output(states)

    def _embed(self, words: Tensor) -> Tensor:
        return self.dropout(self.embedding(words) * self.scale + self.position.weight[: words.shape[1]])


def training(size: str, count: int, device: torch.device, name: str) -> Case:
    """Updates on the batches of models.training."""
    torch.manual_seed(0)
    model = NNTransformer(fields_of(size)).to(device)
    return nn_loop.training(size, name, model, sentences.batches(count, device))
