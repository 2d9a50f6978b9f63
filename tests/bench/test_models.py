"""Operations of a model that is timed are those of its products, counted as torch counts them or by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.bench import models, sentences
from attnbench.bench.sentences import Load
from attnbench.bench.subjects import transformer
from attnbench.core import hooks
from attnbench.tasks import loss
from attnbench.train.runtime import Runtime

CPU = torch.device("cpu")


def test_operations_are_counted_as_torch_counts_them(monkeypatch):
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "TOKENS", 200)
    whole = models.training(transformer("tiny", "softmax"), 1, Runtime(CPU))
    monkeypatch.setattr(hooks, "are_global", lambda *given: False)  # those by which torch's counter knows modules
    with FlopCounterMode(display=False) as counter:
        whole.run()
    assert whole.cost() == counter.get_total_flops()
    monkeypatch.setattr(loss, "LOGITS", 600)  # a part of the logits at a time
    assert models.training(transformer("tiny", "softmax"), 1, Runtime(CPU)).cost() == whole.cost()


@pytest.mark.parametrize("beam", [1, 2])
def test_operations_of_decoding_are_those_of_its_products(beam, monkeypatch):
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "STEPS", 4)
    case = models.decoding(transformer("tiny", "entmax15"), Load(3, 5, beam), Runtime(CPU))
    model = transformer("tiny", "softmax").build(CPU)
    width, inner = model.output.in_features, model.encoder[0].feed_forward.expand.out_features
    layer = 2 * width * inner
    tokens, rows = 3 * 5, 3 * beam
    encoder = len(model.encoder) * (2 * tokens * (4 * width**2 + layer) + 4 * 3 * 5 * 5 * width)
    sources = len(model.decoder) * 2 * tokens * 2 * width**2
    seen = [3, *[rows] * 3]
    step = sum(
        2 * some * (6 * width**2 + layer) + 4 * some * (at + 1) * width + 4 * some * 5 * width
        for at, some in enumerate(seen)
    )
    output = sum(2 * some * width * 60 for some in seen)
    assert case.cost() == encoder + sources + len(model.decoder) * step + output
    assert models.decoding(transformer("tiny", "window, n = 8"), Load(3, 5, beam), Runtime(CPU)).cost is None


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_torch_counts_nothing_of_are_counted(training):
    """Two directions of two layers, as oneDNN has them: a gate's products with what comes in and with the state."""
    layers, states = torch.nn.LSTM(6, 8, 2, bidirectional=True), torch.randn(5, 3, 6, requires_grad=training)

    def run() -> None:
        with torch.set_grad_enabled(training):
            made = layers(states)[0].sum()
        if training:
            made.backward()

    once = 2 * 15 * sum(each.numel() for each in layers.parameters() if each.dim() == 2)
    assert models.operations(run) == once * (3 if training else 1)
