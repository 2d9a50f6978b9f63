"""The models that are timed are those that are named, and the code of each is held to its definition."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.bench import models, sentences, subjects
from attnbench.bench.sentences import Load
from attnbench.bench.subjects import Subject, transformer
from attnbench.bench.timer import TOLERANCE
from attnbench.core import gates, hooks, native
from attnbench.core.dropout import Dropout
from attnbench.data.base import PAD
from attnbench.models import _windows
from attnbench.models.base import Sizes
from attnbench.models.base import models as models_of_specs
from attnbench.train.runtime import Runtime

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_words(monkeypatch):
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "STEPS", 4)


FAMILIES = [each.name for each in subjects.families(8)]


def family(name: str, width: int = 8) -> Subject:
    return next(each for each in subjects.families(width, tokens=300) if each.name == name)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_every_kind_train_and_decode_as_they_are_defined(name):
    subject = pickle.loads(pickle.dumps(family(name)))  # as a process of its own is sent it
    training = models.training(subject, 1, Runtime(CPU))
    training.run()
    assert training.cost() > 0
    assert training.check() < 1e-5
    decoding = models.decoding(subject, Load(3, 5, 2), Runtime(CPU))
    assert decoding.work == 12
    decoding.run()
    assert decoding.check() < 1e-5
    assert decoding.cost() > 0


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_operations_of_recurrent_layers_are_those_of_their_gates(monkeypatch):
    """Counted by torch where its layers are made of products that it knows, without those that lead to first states."""
    training = models.training(family("LSTM, no attention"), 1, Runtime(CPU))
    monkeypatch.setattr(hooks, "are_global", lambda *given: False)  # those by which torch's counter knows modules
    with native.off(), torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        training.run()
    assert 0 <= training.cost() / counter.get_total_flops() - 1 < 0.01


@pytest.mark.parametrize(("module", "name"), [
    (gates, "LSTM, softmax"), (gates, "GRU, additive"), (_windows, "ConvS2S"),
])  # fmt: skip
def test_layers_that_give_other_gradients_than_torchs_are_found(module, name, monkeypatch):
    call = {gates: "lstm" if "LSTM" in name else "gru", _windows: "convolve"}[module]
    real = getattr(module, call)

    def wrong(*given):
        made = real(*given)
        halved = lambda each: each.detach() + (each - each.detach()) / 2  # noqa: E731
        return tuple(map(halved, made)) if isinstance(made, tuple) else halved(made)

    monkeypatch.setattr(module, call, wrong)
    assert models.training(family(name), 1, Runtime(CPU)).check() > 1e-2


def test_transformers_of_a_size():
    softmax, pattern = transformer("tiny", "softmax"), transformer("tiny", "window, n = 8")
    assert (softmax.group, softmax.name, softmax.sizes.target_vocab) == ("tiny", "softmax", 60)
    assert softmax.counted
    assert not pattern.counted  # which looks at fewer keys than are multiplied
    assert {site["pattern"]["kind"] for site in pattern.model["attention"].values()} == {"window", "full"}
    dense = transformer("tiny", f"topk, k = 8{subjects.DEFINED}")
    assert {site["backend"] for site in dense.model["attention"].values()} == {"dense"}
    assert transformer("tiny", f"softmax{subjects.QUANTIZED}").quantization == "int8"


def test_what_is_built_has_the_same_weights_whatever_is_left_out():
    subject = transformer("tiny", "sparsemax")
    made = [subject.build(CPU, defined=defined, dropout=dropout) for defined in (0, 1) for dropout in (1, 0)]
    for each in made[1:]:
        assert all(map(torch.equal, made[0].parameters(), each.parameters()))
    for each, probability in zip(made, (0.1, 0.0) * 2, strict=True):
        assert probability == max(module.p for module in each.modules() if isinstance(module, Dropout))


def test_definitions_are_built_with_all_scores(monkeypatch):
    built, parse = [], models_of_specs.parse
    subject = transformer("tiny", "sparsemax")
    monkeypatch.setattr(models_of_specs, "parse", lambda raw: built.append(raw) or parse(raw))
    for defined in (False, True):
        subject.build(CPU, defined=defined)
    assert [{site["backend"] for site in raw["attention"].values()} for raw in built] == [{"auto"}, {"dense"}]


@pytest.mark.parametrize(("most", "known", "longest", "limit"), [
    (1024, None, 60, 1024), (20, None, 19, 20), (1024, 10, 9, 10), (64, 201, 63, 64), (1024, 201, 200, 201),
])  # fmt: skip
def test_how_long_its_sentences_may_be(most, known, longest, limit):
    subject = transformer("tiny", "softmax")
    sizes = Sizes(60, 60, True, PAD, known)
    subject = subject._replace(model={**subject.model, "max_length": most}, sizes=sizes)
    assert (subject.longest, subject.source_limit) == (longest, limit)
    free = family("LSTM, softmax")
    assert (free.longest, free.source_limit) == (60, None)


def test_models_of_ones_own_may_lack_attention_and_name_fields_as_they_like():
    raw = {
        "kind": "own",
        "use_dropout": True,
        "word_dropout": {"rate": 0.5, "dropout": 0.5},
        "parts": [{"dropout": 0.5}],
    }
    assert subjects._without_dropout(raw) == {
        "kind": "own", "use_dropout": True, "word_dropout": {"rate": 0.5, "dropout": 0.0}, "parts": [{"dropout": 0.0}],
    }  # fmt: skip


def test_subjects_are_known_by_what_they_are():
    subject = transformer("tiny", "softmax")
    assert subject.digest() == subject._replace(name="another").digest()
    assert subject.digest() != subject._replace(search={"kind": "greedy"}).digest()
    assert subject.digest() != transformer("tiny", "sparsemax").digest()
    later = {name: value for name, value in subject.model.items() if name != "norm"}
    assert later != subject.model
    assert subject.digest() == subject._replace(model=later).digest()  # of a version without that field


def test_outputs_are_no_longer_than_the_model_can_make():
    subject = transformer("tiny", "softmax")
    short = subject._replace(model={**subject.model, "max_length": 3})
    case = models.decoding(short, Load(2, 3, 1), Runtime(CPU))
    assert case.work == 2 * 3
    assert case.check() < 1e-5


def test_a_search_of_its_own_takes_the_place_of_the_loads():
    subject = transformer("tiny", "softmax")._replace(search={"kind": "beam", "size": 3, "quantization": "int8"})
    (own, usual) = (models._searched(subject, Load(2, 3, beam), 4) for beam in (None, 5))
    assert own == {"kind": "beam", "size": 3, "quantization": "int8", "max_ratio": 0.0, "max_extra": 4}
    assert usual == {"kind": "beam", "size": 5, "quantization": None, "max_ratio": 0.0, "max_extra": 4}
    assert models.decoding(subject, Load(2, 3, None), Runtime(CPU)).coarse


@pytest.mark.parametrize("known", [True, False])
def test_a_search_in_bfloat16_is_timed_in_it_where_the_device_has_it(known, monkeypatch):
    monkeypatch.setattr("attnbench.search.base.multiplies_bfloat16", lambda device: known)
    subject = transformer("tiny", "softmax")._replace(search={"kind": "greedy", "precision": "bf16"})
    own, usual = (models.decoding(subject, Load(2, 3, beam), Runtime(CPU)) for beam in (None, 1))
    assert (own.coarse, usual.coarse) == (known, False)
    assert usual.check() < 1e-5
    assert own.check() < 10 * TOLERANCE
    assert (own.check() > 1e-5) is known
