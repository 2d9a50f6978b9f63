"""Other packages do the work that is timed beside them: the same batches, the same shapes, as many tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.bench import (
    ctranslate2,
    marian,
    models,
    nn_convs2s,
    nn_kinds,
    nn_recurrent,
    nn_transformer,
    peers,
    sentences,
)
from attnbench.bench.sentences import Load
from attnbench.bench.subjects import Subject, families, fields_of, transformer, words
from attnbench.core.dropout import Dropout
from attnbench.core.errors import MissingExtraError
from attnbench.data.base import PAD
from attnbench.models.base import models as specs
from attnbench.models.convs2s import ConvS2SSpec
from attnbench.models.lstm import LstmSpec
from attnbench.models.transformer import TransformerSpec
from attnbench.tasks.sources import source_of
from attnbench.train.runtime import Runtime

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "TOKENS", 200)
    monkeypatch.setattr(sentences, "STEPS", 4)


def test_packages_that_are_absent_are_named_and_the_others_stay(monkeypatch, caplog):
    def absent():
        raise ModuleNotFoundError("No module named 'gone'", name="gone")

    monkeypatch.setattr(peers, "_KNOWN", {**peers._KNOWN, "gone": absent})
    assert [peer.package for peer in peers.find(["gone", "sdpa"])] == ["sdpa"]
    assert "--against gone: it is not installed; pip install gone; the others are timed" in caplog.text
    with pytest.raises(MissingExtraError, match=r"--against gone: it is not installed; pip install gone$"):
        peers.find(["gone"])


def test_torch_trains_as_many_tokens():
    ours = models.training(transformer("tiny", "softmax"), 1, Runtime(CPU))
    theirs = nn_transformer.training("tiny", 1, CPU, nn_transformer.SHIPPED)
    assert ours.work == theirs.work > 0
    assert theirs.name.endswith("as shipped")
    theirs.run()


def test_marian_trains_as_many_tokens():
    pytest.importorskip("transformers", reason="the package that is timed is not installed")
    ours = models.training(transformer("tiny", "softmax"), 1, Runtime(CPU))
    theirs = marian.training("tiny", 1, CPU)
    assert ours.work == theirs.work > 0
    assert theirs.name.endswith("as shipped")
    theirs.run()
    spec = fields_of("tiny")
    (marians, torchs) = (
        sum(each.numel() for each in made.parameters() if each.requires_grad)
        for made in (marian.Marian(spec, words()), nn_transformer.NNTransformer(spec, words()))
    )
    positions, last_norms = nn_transformer.LONGEST * spec.width, 4 * spec.width
    assert marians == torchs - positions - last_norms
    model = marian.Marian(spec, words()).eval()
    source = torch.tensor([[5, 6, 7, 2], [5, 6, 2, PAD]])
    target = torch.tensor([[1, 8, 9], [1, 8, 9]])
    with torch.no_grad():
        longer = model(torch.nn.functional.pad(source, (0, 3), value=PAD), target)
        torch.testing.assert_close(model(source, target), longer)  # padding is not looked at


@pytest.mark.parametrize("peer", [False, True])
def test_an_update_is_a_whole_one(peer, monkeypatch):
    """Adam has taken a step of every parameter for each batch, and ours were clipped."""
    made, clipped = [], []
    adam, clip = torch.optim.Adam.__init__, models.clip
    monkeypatch.setattr(torch.optim.Adam, "__init__", lambda self, *a, **k: made.append(self) or adam(self, *a, **k))
    monkeypatch.setattr(models, "clip", lambda model, most: clipped.append(most) or clip(model, most))
    if peer:
        nn_transformer.training("tiny", 2, CPU, nn_transformer.SHIPPED).run()
    else:
        models.training(transformer("tiny", "softmax"), 2, Runtime(CPU)).run()
    (optimizer,) = made
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            assert int(state["step"]) == 2
            assert float(state["exp_avg_sq"].sum()) > 0
    assert clipped == ([] if peer else [1.0, 1.0])


def test_on_a_gpu_torch_is_timed_as_shipped_alone():
    (peer,) = peers.find(["torch"])
    assert peer.training is not None
    for device, count in ((CPU, 2), (torch.device("cuda"), 1)):
        assert len(peer.training("tiny", 1, device)) == count


def test_torch_has_the_parameters_of_the_model_here_but_for_its_positions_and_last_norms():
    spec = fields_of("tiny")
    ours = transformer("tiny", "softmax").build(CPU)
    theirs = nn_transformer.NNTransformer(spec, words())
    more = nn_transformer.LONGEST * spec.width + 4 * spec.width  # nn.Transformer ends both stacks with a norm
    assert _count(theirs) - _count(ours) == more


RECURRENT: dict[str, dict[str, Any]] = {
    "no attention": {"readout": "state", "attention": {"cross": {"module": "none"}}},
    "taken at once": {"attention": {"cross": {"score": "bilinear"}}},
    "fed": {"input_feeding": "attentional", "attention": {"cross": {"score": "bilinear"}}},
    "fed with the context": {"input_feeding": "context", "attention": {"cross": {"score": "additive"}}},
    "both ways": {
        "query": "previous", "readout": "concat", "bidirectional": True, "attention": {"cross": {"score": "additive"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("name", RECURRENT)
def test_what_is_written_in_torch_is_the_recurrent_model_number_for_number(name, kind):
    spec = specs.parse({"kind": kind, "layers": 2, "width": 6, "embedding": 5, "dropout": 0.3, **RECURRENT[name]})
    assert nn_recurrent.serves(spec)
    ours, theirs = spec.build(words()).eval(), nn_recurrent.NNRecurrent(spec, words()).eval()
    _give(ours, theirs)
    assert _count(ours) == _count(theirs)
    _gives_the_same(ours, theirs)


@pytest.mark.parametrize("raw", [
    {}, {"share_attention": True, "kernel": 4}, {"decoder_layers": 1, "tie": "decoder"}, {"kernel": 2, "tie": "all"},
], ids=str)  # fmt: skip
def test_what_is_written_in_torch_is_the_convs2s_number_for_number(raw):
    spec = specs.parse({"kind": "convs2s", "layers": 2, "width": 6, "embedding": 5, "dropout": 0.3, **raw})
    assert nn_convs2s.serves(spec)
    ours, theirs = spec.build(words()).eval(), nn_convs2s.NNConvS2S(spec, words()).eval()
    assert _count(ours) == _count(theirs)
    given = dict(ours.named_parameters())
    names = {
        "source": "source_embedding.table", "target": "target_embedding.table", "encoder": "encoder.layers",
        "source_position": "source_embedding.positions", "target_position": "target_embedding.positions",
        "expand.0": "encoder.expand", "contract.0": "encoder.contract", "expand.1": "expand", "contract.1": "contract",
    }  # fmt: skip
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            place, _, kind = name.rpartition(".")
            part, _, number = place.partition(".")
            if part in ("query", "context"):
                path = f"attention.{number}.project_{part}"
            elif place in names:
                path = names[place]
            else:
                path = ".".join([names.get(part, part), *([number] if number else [])])
            parameter.copy_(given.pop(f"{path}.{kind}"))
    assert not given
    _gives_the_same(ours, theirs)


def _gives_the_same(ours: Any, theirs: Any) -> None:
    (batch,) = sentences.batches(1, CPU)
    wanted = theirs(batch.source, batch.target_in)
    found = ours.logits(ours.decode(ours.encode(source_of(batch)), batch.target_in).hidden)
    there = batch.target_valid
    torch.testing.assert_close(found[there], wanted[there], rtol=1e-4, atol=1e-5)
    wanted[there].square().sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in theirs.parameters())


def _give(ours: Any, theirs: Any) -> None:
    """The weights of ours to what torch's modules are."""
    given = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            place, _, rest = name.partition(".")
            if place == "cells":
                number, _, kind = rest.partition(".")
                source = given.pop(f"decoder.{kind}_l{number}")
            else:
                path = {
                    "source": "encoder.table", "target": "table", "encoder": "encoder.layers",
                    "bridges": "encoder.bridges",
                }.get(place, place)  # fmt: skip
                own = {
                    "key.weight": "key_weight" if theirs.query is not None else "weight", "key.bias": "bias",
                    "query.weight": "query_weight", "vector.weight": "vector",
                }.get(name)  # fmt: skip
                source = given.pop(f"attention.score.{own}" if own else f"{path}.{rest}")
            matrix = place in ("key", "query") and rest == "weight"
            parameter.copy_((source.squeeze(0).t() if matrix else source).reshape(parameter.shape))
    assert not given


@pytest.mark.parametrize("raw", [
    {"attention": {"cross": {"score": "additive", "transform": "sparsemax"}}},
    {"attention": {"cross": {"score": "additive", "coverage": "neural"}}},
    {"attention": {"cross": {"score": {"kind": "additive", "units": 4}}}},
    {"attention": {"cross": {"score": "dot"}}},
    {"attention_dropout": 0.1, "attention": {"cross": {"score": "additive"}}},
    {"attention": {"cross": {"score": "bilinear", "pattern": {"kind": "random", "n": 2}}}},
    {"attention": {"cross": {"module": {"kind": "fixed_memory", "slots": 4}}}},
    {"kind": "convs2s", "attention": {"cross": {"transform": "sparsemax"}}},
    {"kind": "convs2s", "attention": {"cross": {"module": "multihead"}}},
    {"kind": "transformer", "attention": {"cross": {"transform": "sparsemax"}}},
    {"kind": "transformer", "attention": {"encoder_self": {"pattern": {"kind": "window", "n": 3}}}},
], ids=str)  # fmt: skip
def test_what_is_not_written_in_torch_is_not_timed(raw):
    spec = specs.parse({"kind": "lstm", "layers": 1, "width": 8, **raw})
    assert not nn_kinds.serves(spec)
    (peer,) = peers.find(["torch"])
    assert peer.models is not None
    assert not peer.models(Subject("a", "b", spec.dump(), words()), 1, CPU)


@pytest.mark.parametrize("kind", [LstmSpec, ConvS2SSpec, TransformerSpec])
def test_a_model_of_ones_own_is_not_taken_for_what_it_comes_from(kind):
    class Own(kind):
        pass

    raw = {"attention": {"cross": {"score": "bilinear"}}} if kind is LstmSpec else {}
    assert nn_kinds.serves(kind.model_validate(raw))
    assert not nn_kinds.serves(Own.model_validate(raw))


@pytest.mark.parametrize("name", ["LSTM, softmax", "GRU, additive", "ConvS2S"])
def test_torch_drops_out_as_much_as_is_dropped_out_here(name):
    """As often, and with the same chance."""
    subject = next(each for each in families(8, 200) if each.name == name)
    (batch,) = sentences.batches(1, CPU)

    def dropped(model: Any, run: Callable[[], Any]) -> list[float]:
        found: list[float] = []
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout | Dropout):
                module.register_forward_hook(lambda module, *_: found.append(module.p))
        run()
        return [chance for chance in found if chance]

    ours, theirs = subject.build(CPU).train(), nn_kinds.build(subject).train()
    wanted = dropped(ours, lambda: ours.decode(ours.encode(source_of(batch)), batch.target_in))
    found = dropped(theirs, lambda: theirs(batch.source, batch.target_in))
    for module in theirs.modules():  # within torch's layers, where ours is a module
        if isinstance(module, torch.nn.RNNBase) and module.dropout:
            found += [module.dropout] * (module.num_layers - 1)
    assert found == wanted != []


def test_torch_is_given_the_same_batches_smoothing_and_optimiser(monkeypatch):
    subject = next(each for each in families(8, 200) if each.name == "LSTM, softmax")
    update = subject.update._replace(smoothing=0.25, optimizer={"kind": "sgd"})
    subject, real = subject._replace(update=update), torch.nn.functional.cross_entropy
    told, stepped = [], []
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda *given, **more: told.append(
        (given[1], more["label_smoothing"])) or real(*given, **more))  # fmt: skip
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *given: stepped.append(1) or step(self, *given))
    nn_kinds.training(subject, 2, CPU, nn_kinds.SHIPPED).run()
    wanted = [batch.target_out.flatten() for batch in sentences.batches(2, CPU, 200)]
    assert all(torch.equal(found, batch) for (found, _), batch in zip(told, wanted, strict=True))
    assert [smoothing for _, smoothing in told] == [0.25, 0.25]
    assert len(stepped) == 2


def test_torch_trains_models_of_every_kind_by_as_many_tokens():
    (peer,) = peers.find(["torch"])
    assert peer.models is not None
    named = {subject.name: peer.models(subject, 1, CPU) for subject in families(8, 200)}
    assert [name for name, recipes in named.items() if recipes] == [
        "Transformer", "LSTM, no attention", "LSTM, softmax", "GRU, additive", "ConvS2S"
    ]  # fmt: skip
    for subject in families(8, 200):
        beside = models.training(nn_kinds.ours(subject), 1, Runtime(CPU))
        for recipe in named[subject.name]:
            case = recipe.make(*recipe.given)
            assert (case.group, case.work) == (beside.group, beside.work)
            case.run()


@pytest.mark.parametrize("raw", [
    {}, {"norm": "pre", "tie": "none", "output_bias": True}, {"decoder_layers": 1, "tie": "decoder"},
], ids=str)  # fmt: skip
def test_torchs_transformer_has_the_layout_of_a_spec(raw):
    """But for positions, and norms that end both stacks: with norms before sublayers ours has those, too."""
    spec = specs.parse({"kind": "transformer", "preset": "tiny", "max_length": 64, **raw})
    ours, theirs = spec.build(words()), nn_transformer.NNTransformer(spec, words())
    more = nn_transformer.LONGEST * 128 + (0 if raw.get("norm") == "pre" else 4 * 128)
    assert _count(theirs) - _count(ours) == more


def test_torch_learns_what_the_batch_holds():
    torch.manual_seed(0)
    model = nn_transformer.NNTransformer(fields_of("tiny"), words()).eval()
    (batch,) = sentences.batches(1, CPU)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        logits = model(batch.source, batch.target_in).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.target_out.flatten(), ignore_index=PAD)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_what_torch_looks_at_is_not_padding_nor_what_comes_later():
    torch.manual_seed(0)
    model = nn_transformer.NNTransformer(fields_of("tiny"), words()).eval()
    source, target = torch.randint(5, 60, (2, 6)), torch.randint(5, 60, (2, 5))
    with torch.no_grad():
        wanted = model(source, target)
        padded = model(torch.nn.functional.pad(source, (0, 3), value=PAD), target)
        target[:, 3:] = 7
        changed = model(source, target)
    torch.testing.assert_close(padded, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(changed[:, :3], wanted[:, :3], rtol=1e-4, atol=1e-5)


def test_torch_is_timed_with_and_without_what_every_training_here_sets():
    (peer,) = peers.find(["torch"])
    assert peer.training is not None
    assert [recipe.shipped for recipe in peer.training("tiny", 1, CPU)] == [True, False]


def test_torch_drops_where_the_model_here_does_but_for_weights():
    """Of states before they join the residual stream; nothing within the feed-forward blocks."""
    spec = fields_of("tiny")
    model = nn_transformer.NNTransformer(spec, words()).train()
    layers = [*model.stacks.encoder.layers, *model.stacks.decoder.layers]
    assert len(layers) == 2 * spec.layers
    for layer in layers:
        states = torch.ones(4, 7, spec.ffn)
        assert torch.equal(layer.dropout(states), states)
        assert layer.dropout1.p == layer.dropout2.p == spec.dropout > 0


def test_ctranslate2_decodes_as_many_tokens():
    pytest.importorskip("ctranslate2", reason="the package that is timed is not installed")
    (peer,) = peers.find(["ctranslate2"])
    assert peer.decoding is not None
    found = [recipe.make(*recipe.given) for recipe in peer.decoding("tiny", Load(3, 5, 2), 1)]
    assert [case.name for case in found] == ["CTranslate2, float32", "CTranslate2, int8"]
    for case in found:
        assert (case.group, case.work) == ("tiny, beam 2, 3 x 5", 12)
        case.run()  # which counts the words of each output


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_ctranslate2_gets_what_it_is_timed_with(kind, monkeypatch, tmp_path):
    package = pytest.importorskip("ctranslate2", reason="the package that is timed is not installed")
    seen = []

    class Translator:
        def __init__(self, folder, **given):
            seen.append(given)

        def translate_batch(self, sources, **given):
            seen.append({"rows": len(sources), "lengths": {len(row) for row in sources}, **given})
            return [SimpleNamespace(hypotheses=[["w"] * sentences.STEPS]) for _ in sources]

    monkeypatch.setattr(package, "Translator", Translator)
    ctranslate2.decoding("tiny", Load(3, 5, 2), kind, 7).run()
    assert seen == [
        {"device": "cpu", "compute_type": kind, "inter_threads": 1, "intra_threads": 7},
        {"rows": 3, "lengths": {5}, "beam_size": 2, "max_batch_size": 3, "batch_type": "examples",
         "min_decoding_length": sentences.STEPS, "max_decoding_length": sentences.STEPS},
    ]  # fmt: skip


def test_ctranslate2_has_the_products_of_the_model_here():
    pytest.importorskip("ctranslate2", reason="the package that is timed is not installed")
    made = ctranslate2._model("tiny", [*ctranslate2.SPECIALS, *(f"w{place}" for place in range(4, sentences.WORDS))])
    variables = made.variables(ordered=False).items()
    theirs = sorted(tuple(each.shape) for name, each in variables if name.endswith("weight") and "/layer_" in name)
    ours = transformer("tiny", "softmax").build(CPU)
    own = [tuple(each.weight.shape) for each in ours.modules() if isinstance(each, torch.nn.Linear)]
    assert sum(map(math.prod, theirs)) == sum(map(math.prod, own)) - sentences.WORDS * fields_of("tiny").width


def _count(model: torch.nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())
