"""torch.nn.Transformer as its users train it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from attnbench.attention.types import ROLES
from attnbench.bench import nn_loop, sentences
from attnbench.bench.subjects import SMOOTHING, fields_of, words
from attnbench.bench.timer import Case
from attnbench.data.base import PAD
from attnbench.models.base import ModelSpec, Sizes
from attnbench.models.transformer import TransformerSpec

SHIPPED = "torch.nn.Transformer, float32, as shipped"
SET_UP = "torch.nn.Transformer, float32"
"""With the products and the memory that every training here has."""
LONGEST = 128


def serves(spec: ModelSpec) -> bool:
    """Whether torch has a Transformer of this layout: full attention by softmax at every site."""
    if type(spec) is not TransformerSpec:
        return False
    sites = [spec.attention.site(role) for role in ROLES]
    return all(
        site.module.kind == "multihead" and site.score.kind == "scaled_dot" and site.pattern.kind == "full"
        and site.bias is None and site.transform.kind == "softmax"
        for site in sites
    )  # fmt: skip


class NNTransformer(nn_loop.Model):
    """Of the sizes of a spec, with learned positions and a norm for each sublayer whatever that says; dropout as torch
    has it, on the attention's weights too, but none within the feed-forward blocks."""

    def __init__(self, spec: TransformerSpec, sizes: Sizes) -> None:
        super().__init__()
        self.scale = spec.width**0.5
        self.source = nn.Embedding(sizes.source_vocab, spec.width, padding_idx=PAD)
        self.target = (
            self.source if spec.tie == "all" else nn.Embedding(sizes.target_vocab, spec.width, padding_idx=PAD)
        )
        for table in (self.source, self.target):
            nn.init.normal_(table.weight, std=spec.width**-0.5)
        self.position = nn.Embedding(max(LONGEST, min(spec.max_length, (sizes.longest_source or 0) + 2)), spec.width)
        self.dropout = nn.Dropout(spec.dropout)
        layers = spec.layers, spec.decoder_layers or spec.layers
        with warnings.catch_warnings():  # of nested tensors, which it cannot have where norms stand first
            warnings.simplefilter("ignore")
            self.stacks = nn.Transformer(
                spec.width, spec.heads, *layers, spec.ffn, dropout=spec.dropout, batch_first=True,
                norm_first=spec.norm == "pre",
            )  # fmt: skip
        for layer in [*self.stacks.encoder.layers, *self.stacks.decoder.layers]:
            layer.dropout = nn.Identity()
        self.output = nn.Linear(spec.width, sizes.target_vocab, bias=spec.output_bias)
        if spec.tie != "none":
            self.output.weight = self.target.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        states = self.stacks(
            self._embed(source, self.source), self._embed(target, self.target), tgt_mask=future, tgt_is_causal=True,
            src_key_padding_mask=source == PAD, tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )  # fmt: skip
        return self.output(states)

    def _embed(self, words: Tensor, table: nn.Embedding) -> Tensor:
        return self.dropout(table(words) * self.scale + self.position.weight[: words.shape[1]])


def training(size: str, count: int, device: torch.device, name: str) -> Case:
    """Updates on the batches of models.training, by torch's Adam."""
    torch.manual_seed(0)
    model = NNTransformer(fields_of(size), words()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    return nn_loop.training(size, name, model, sentences.batches(count, device), optimizer, SMOOTHING)
