"""The Transformer of Hugging Face's transformers for translation, Marian, as its users train it."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from attnbench.bench import nn_loop, sentences
from attnbench.bench.nn_transformer import LONGEST
from attnbench.bench.subjects import SMOOTHING, fields_of, words
from attnbench.bench.timer import Case
from attnbench.data.base import BOS, EOS, PAD
from attnbench.models.base import Sizes
from attnbench.models.transformer import TransformerSpec

SHIPPED = "transformers' Marian, float32, as shipped"


class Marian(nn_loop.Model):
    """Of the sizes of a spec, with one embedding for both sides and the output, positions by sinusoids, a norm behind
    each sublayer, attention by SDPA; dropout on the attention's weights, too, none within the feed-forward blocks."""

    def __init__(self, spec: TransformerSpec, sizes: Sizes) -> None:
        super().__init__()
        package: Any = importlib.import_module("transformers")
        self.model = package.MarianMTModel(package.MarianConfig(
            vocab_size=sizes.source_vocab, decoder_vocab_size=sizes.target_vocab, tie_word_embeddings=True,
            d_model=spec.width, max_position_embeddings=LONGEST, scale_embedding=True,
            encoder_layers=spec.layers, decoder_layers=spec.decoder_layers or spec.layers,
            encoder_attention_heads=spec.heads, decoder_attention_heads=spec.heads,
            encoder_ffn_dim=spec.ffn, decoder_ffn_dim=spec.ffn, activation_function="relu",
            dropout=spec.dropout, attention_dropout=spec.dropout, activation_dropout=0.0,
            pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS, decoder_start_token_id=BOS,
            forced_eos_token_id=None, attn_implementation="sdpa",
        ))  # fmt: skip

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen = (source != PAD).long()
        return self.model(input_ids=source, attention_mask=seen, decoder_input_ids=target, use_cache=False).logits


def training(size: str, count: int, device: torch.device) -> Case:
    """Updates on the batches of models.training, by torch's Adam."""
    torch.manual_seed(0)
    model = Marian(fields_of(size), words()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    return nn_loop.training(size, SHIPPED, model, sentences.batches(count, device), optimizer, SMOOTHING)
