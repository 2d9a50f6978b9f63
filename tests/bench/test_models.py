"""Trainings and searches that are timed are checked against their definition, and the operations of their products are
counted as torch counts them or by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.bench import models, sentences
from attnbench.bench.sentences import Load
from attnbench.bench.subjects import PATTERNS, Subject, transformer
from attnbench.core import hooks
from attnbench.tasks import loss
from attnbench.train import recorded
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_and_decoding_run(precision, monkeypatch):
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "TOKENS", 200)
    monkeypatch.setattr(sentences, "STEPS", 4)
    runtime = Runtime(CPU, precision)
    training = models.training(transformer("tiny", "topk, k = 8"), 1, runtime)
    training.run()
    assert training.cost() > 0
    assert training.check() < (1e-2 if precision == "bf16" else 1e-5)
    load = Load(3, 5, 2)
    assert load.group("tiny") == "tiny, beam 2, 3 x 5"
    assert Load(3, 5, 1).group("tiny") == "tiny, greedy, 3 x 5"
    for name in ("softmax", "entmax15", "softmax, int8", *PATTERNS):
        case = models.decoding(transformer("tiny", name), load, runtime)
        assert (case.name, case.work) == (name, 12)
        case.run()
        assert case.check() < (1e-2 if precision == "bf16" else 1e-5)


def test_what_is_searched_in_8_bits_is(monkeypatch):
    monkeypatch.setattr(sentences, "WORDS", 60)
    load, runtime = Load(3, 5, 2), Runtime(CPU)
    names = ("softmax", "softmax, int8")
    plain, rounded = (models.decoding(transformer("tiny", name), load, runtime).run() for name in names)
    apart = [abs(plain[row].log_prob / rounded[row].log_prob - 1) for row in plain]
    assert 1e-5 < max(apart) < 0.1


def test_a_few_outputs_may_lie_a_little_further_from_their_definition():
    assert models._together([3e-3]) == 3e-3
    assert models._together([0.0] * 62 + [2e-3, 3e-3]) == pytest.approx(3e-4)
    assert models._together([0.0] * 63 + [0.5]) == pytest.approx(0.05)
    assert models._together([2e-3] * 64) == pytest.approx(2e-3)
    assert math.isnan(models._together([1e-7] * 99 + [math.nan]))


@pytest.mark.parametrize("factor", [2, -1])
def test_a_training_that_is_wrong_is_found(factor, monkeypatch):
    """A gradient of another length, and one of another direction, as long as the right one; the loss is right."""
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "TOKENS", 200)
    training = models.training(transformer("tiny", "softmax"), 1, Runtime(CPU))
    real = recorded.accumulate

    def wrong(task, model, *given):
        found = real(task, model, *given)
        for each in model.parameters():
            each.grad *= factor
        return found

    monkeypatch.setattr(recorded, "accumulate", wrong)
    assert training.check() > 0.1


def test_a_gradient_that_one_parameter_lacks_is_found(monkeypatch):
    """However little of the whole it is, as an alpha that is learned."""
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "TOKENS", 200)
    training = models.training(transformer("tiny", "entmax, learned alpha"), 1, Runtime(CPU))
    assert training.check() < 1e-5
    real, lacking = recorded.accumulate, []

    def wrong(task, model, *given):
        found = real(task, model, *given)
        parameters = dict(model.named_parameters())
        lacking[:] = [name for name in parameters if name.endswith("cross.transform.raw")][:1]
        parameters[lacking[0]].grad = None
        return found

    monkeypatch.setattr(recorded, "accumulate", wrong)
    assert training.check() == pytest.approx(1 / 2)
    assert lacking


@pytest.mark.parametrize(("precision", "name"), [("bf16", "softmax"), ("fp32", "softmax, int8")])
def test_outputs_that_are_worse_than_those_of_the_definition_are_found(precision, name, monkeypatch):
    """Where many are others, and their scores are what the definition gives them."""
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "STEPS", 4)
    monkeypatch.setattr(models, "_off_scores", lambda *given: [0.0])
    kind = type(models.task())
    real = kind.decode

    def worse(*given, **more):
        return {row: best._replace(score=3 * best.score) for row, best in real(*given, **more).items()}

    monkeypatch.setattr(kind, "decode", worse)
    case = models.decoding(transformer("tiny", name), Load(3, 5, 1), Runtime(CPU, precision))
    assert case.check() == pytest.approx(2 / 3 / 20, abs=1e-3)


@pytest.mark.parametrize(("factor", "wanted"), [(1.0, 0.0), (1.01, math.inf)])
def test_more_than_a_few_outputs_of_other_scores_are_found(factor, wanted, monkeypatch):
    """Two outputs whose scores are the same to some digits may be parted by a last one."""
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "STEPS", 4)
    kind = type(models.task())
    real = kind.decode

    def others(*given, **more):
        found = real(*given, **more)
        return {
            row: best._replace(tokens=[each + 1 for each in best.tokens], score=factor * best.score)
            for row, best in found.items()
        }

    monkeypatch.setattr(kind, "decode", others)
    monkeypatch.setattr(models, "_off_scores", lambda plain, batch, found: [0.0] * len(found))
    assert models.decoding(transformer("tiny", "softmax"), Load(3, 5, 1), Runtime(CPU)).check() == wanted


@pytest.mark.parametrize(("precision", "name"), [("fp32", "softmax"), ("bf16", "softmax"), ("fp32", "softmax, int8")])
@pytest.mark.parametrize("beam", [1, 2])
def test_a_search_that_is_wrong_is_found(precision, name, beam, monkeypatch):
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "STEPS", 4)
    real = Subject.build

    def wrong(subject, device, *, defined=False):
        model = real(subject, device, defined=defined)
        with torch.no_grad():
            for each in model.parameters():
                each *= 1 if defined else 1.1
        return model

    monkeypatch.setattr(Subject, "build", wrong)
    assert models.decoding(transformer("tiny", name), Load(3, 5, beam), Runtime(CPU, precision)).check() > 2e-2


def test_outputs_that_are_shorter_than_told_are_found(monkeypatch):
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "STEPS", 4)
    case = models.decoding(transformer("tiny", "softmax"), Load(3, 5, 1), Runtime(CPU))
    assert case.check() < 1e-5
    monkeypatch.setattr(sentences, "STEPS", 5)  # which the search has not been told
    assert case.check() == math.inf
