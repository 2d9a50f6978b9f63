"""CTranslate2, which decodes Transformers made elsewhere: a model of the same shape, with random weights."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import numpy as np
import torch

from attnbench.bench import sentences
from attnbench.bench.sentences import Load
from attnbench.bench.subjects import fields_of
from attnbench.bench.timer import Case

COMPUTED_IN = ("float32", "int8")
NAME = "CTranslate2, {}"
SPECIALS = ["<unk>", "<blank>", "<s>", "</s>"]
LONGEST = 256


def decoding(size: str, load: Load, kind: str, threads: int) -> Case:
    """Outputs of as many tokens as models.decoding makes. kind: "float32", or "int8" for weights of 8 bits."""
    package: Any = importlib.import_module("ctranslate2")
    words = [*SPECIALS, *(f"w{place}" for place in range(len(SPECIALS), sentences.WORDS))]
    with tempfile.TemporaryDirectory() as folder:
        _model(size, words).save(folder)
        translator = package.Translator(folder, device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads)
    ids = np.random.default_rng(0).integers(len(SPECIALS), sentences.WORDS, (load.rows, load.length - 1))
    sources = [[words[place] for place in row] + ["</s>"] for row in ids]

    def run() -> None:
        found = translator.translate_batch(
            sources, beam_size=load.beam, max_batch_size=load.rows, batch_type="examples",
            min_decoding_length=sentences.STEPS, max_decoding_length=sentences.STEPS,
        )  # fmt: skip
        assert all(len(each.hypotheses[0]) == sentences.STEPS for each in found)

    return Case(load.group(size), NAME.format(kind), run, load.rows * sentences.STEPS, coarse=kind == "int8")


def _model(size: str, words: list[str]) -> Any:
    specs: Any = importlib.import_module("ctranslate2.specs")
    fields = fields_of(size)
    made = specs.TransformerSpec.from_config(
        (fields.layers, fields.layers), fields.heads, pre_norm=False, activation=specs.Activation.RELU
    )
    width, torn = fields.width, torch.Generator().manual_seed(0)

    def random(*shape: int) -> np.ndarray:
        return (torch.randn(*shape, generator=torn) * shape[-1] ** -0.5).numpy()

    def linear(layer: Any, out: int, come: int) -> None:
        layer.weight, layer.bias = random(out, come), np.zeros(out, np.float32)

    def norm(layer: Any) -> None:
        layer.gamma, layer.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    def attention(layer: Any, widths: tuple[int, ...]) -> None:
        norm(layer.layer_norm)
        for place, out in enumerate(widths):
            linear(layer.linear[place], out, width)

    encoder, decoder = made.encoder, made.decoder
    table = random(len(words), width)
    sources = encoder.embeddings[0] if isinstance(encoder.embeddings, list) else encoder.embeddings
    for each in (sources, decoder.embeddings):
        each.weight, each.multiply_by_sqrt_depth = table, True
    decoder.projection.weight = table
    encoder.position_encodings.encodings = decoder.position_encodings.encodings = random(LONGEST, width)
    for layer in (*encoder.layer, *decoder.layer):
        attention(layer.self_attention, (3 * width, width))
        norm(layer.ffn.layer_norm)
        linear(layer.ffn.linear_0, fields.ffn, width)
        linear(layer.ffn.linear_1, width, fields.ffn)
    for layer in decoder.layer:
        attention(layer.attention, (width, 2 * width, width))
    made.register_source_vocabulary(words)
    made.register_target_vocabulary(words)
    made.validate()
    made.optimize(quantization=None)
    return made
