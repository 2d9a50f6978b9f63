"""ConvS2S: the size that the copy paper prints, its mathematics position by position, its state, its spec."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from attnbench.attention.modules.base import modules
from attnbench.attention.scores.base import scores
from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.core import packed_steps
from attnbench.core.dropout import Dropout
from attnbench.core.packed import packed
from attnbench.core.spec import dotted, problems
from attnbench.models import _windows
from attnbench.models.base import Sizes, Source, models
from attnbench.models.convs2s import ConvS2S, ConvS2SSpec, GatedConvolution
from attnbench.train.state import load_weights, save_weights

JOINT, APART = Sizes(21, 21, joint=True), Sizes(17, 21, joint=False)
ROOT_HALF = math.sqrt(0.5)


def parse(**raw: Any) -> ConvS2SSpec:
    return ConvS2SSpec.model_validate(raw)


def build(sizes: Sizes = APART, **raw: Any) -> ConvS2S:
    torch.manual_seed(1)
    small = {"layers": 2, "embedding": 6, "width": 8, "dropout": 0.0, "max_length": 20}
    model = parse(**{**small, **raw}).build(sizes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def batch() -> tuple[Source, Tensor]:
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(3, 17, (3, 6), generator=generator)
    valid = torch.arange(6) < torch.tensor([6, 1, 4])[:, None]
    return Source(source, valid), torch.randint(3, 21, (3, 5), generator=generator)


def faults(**raw: Any) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        parse(**raw)
    return {dotted(path): message for path, message in problems(caught.value)}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_the_model_of_copy_this_sentence():
    with torch.device("meta"):
        model = parse(share_attention=True, max_length=100).build(Sizes(22110, 22110, joint=False))
    assert count(model) == 49_320_286


def test_attention_is_one_a_layer_or_one_for_all():
    alone, shared = build(decoder_layers=4), build(decoder_layers=4, share_attention=True)
    one = 8 * 6 + 6 + 6 * 8 + 8
    assert count(alone) - count(shared) == 3 * one
    source, _ = batch()
    assert len(alone.encode(source).cross) == 4
    assert len(shared.encode(source).cross) == 1
    score = {"default": {"score": {"kind": "additive", "units": 5}}}
    unshared = build(decoder_layers=4, attention=score)
    network = 2 * 6 * 5 + 5 + 5
    assert count(unshared) - count(alone) == 4 * network
    assert count(build(decoder_layers=4, attention=score, share_attention=True)) - count(shared) == network


@pytest.mark.parametrize("tie", ["all", "decoder", "none"])
def test_ties_share_exactly(tie):
    model = build(JOINT, tie=tie)
    source, target = model.source_embedding.table.weight, model.target_embedding.table.weight
    assert (source is target) == (tie == "all")
    assert (model.output.weight is target) == (tie in ("all", "decoder"))
    assert (model.output.weight is source) == (tie == "all")


def test_one_table_needs_one_vocabulary():
    with pytest.raises(ValueError, match="tie 'all' shares one table"):
        parse(tie="all").build(APART)


# ---- mathematics ----------------------------------------------------------------------------------------------------


def affine(linear: Any, state: Tensor) -> Tensor:
    return linear.weight @ state + linear.bias


def gated(convolution: Any, window: list[Tensor]) -> Tensor:
    """One position of `GLU(conv(x))`: a matrix for each tap, the first half times the sigmoid of the second."""
    both = convolution.bias.clone()
    for tap, state in enumerate(window):
        both += convolution.weight[:, :, tap] @ state
    half = len(both) // 2
    return both[:half] / (1 + torch.exp(-both[half:]))


def around(states: list[Tensor], at: int, before: int, after: int) -> list[Tensor]:
    """The states from `before` positions before `at` to `after` after it, zeros beyond the ends."""
    zero = torch.zeros_like(states[0])
    return [states[i] if 0 <= i < len(states) else zero for i in range(at - before, at + after + 1)]


def by_hand(model: ConvS2S, source: list[int], target: list[int], kernel: int) -> tuple[Tensor, list[Tensor]]:
    """Hidden states and the weights of each decoder layer, for one sentence pair without padding."""

    def embed(side: Any, tokens: list[int]) -> list[Tensor]:
        return [side.table.weight[token] + side.positions.weight[at] for at, token in enumerate(tokens)]

    words = embed(model.source_embedding, source)
    states = [affine(model.encoder.expand, word) for word in words]
    for layer in model.encoder.layers:
        before = (kernel - 1) // 2
        windows = [around(states, at, before, kernel - 1 - before) for at in range(len(states))]
        states = [(gated(layer, w) + s) * ROOT_HALF for w, s in zip(windows, states, strict=True)]
    keys = torch.stack([affine(model.encoder.contract, state) for state in states])
    values = (keys + torch.stack(words)) * ROOT_HALF

    inputs = embed(model.target_embedding, target)
    states = [affine(model.expand, word) for word in inputs]
    maps = []
    for number, layer in enumerate(model.decoder):
        shared = model.attention[number if len(model.attention) > 1 else 0]
        windows = [around(states, at, kernel - 1, 0) for at in range(len(states))]
        rows, out = [], []
        for window, state, word in zip(windows, states, inputs, strict=True):
            h = gated(layer, window)
            d = (affine(shared.project_query, h) + word) * ROOT_HALF
            weights = torch.exp(keys @ d) / torch.exp(keys @ d).sum()
            context = weights @ values * len(source) * math.sqrt(1 / len(source))
            attended = (affine(shared.project_context, context) + h) * ROOT_HALF
            rows.append(weights)
            out.append((attended + state) * ROOT_HALF)
        states = out
        maps.append(torch.stack(rows))
    return torch.stack([affine(model.contract, state) for state in states]), maps


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [False, True])
@torch.no_grad()
def test_equals_the_definition_position_by_position(kernel, share):
    model = build(kernel=kernel, share_attention=share, decoder_layers=3)
    source, target = batch()
    decoded = model.decode(model.encode(source, need_weights=True), target, need_weights=True)
    assert decoded.maps is not None
    assert set(decoded.maps) == {"cross"}
    assert len(decoded.maps["cross"]) == 3
    for row, length in enumerate(source.valid.sum(1).tolist()):
        hidden, maps = by_hand(model, source.data[row, :length].tolist(), target[row].tolist(), kernel)
        torch.testing.assert_close(decoded.hidden[row], hidden, rtol=0, atol=1e-12)
        for found, wanted in zip(decoded.maps["cross"], maps, strict=True):
            torch.testing.assert_close(found[row, 0, :, :length], wanted, rtol=0, atol=1e-12)
            assert not found[row, 0, :, length:].any()
    wanted = decoded.hidden @ model.output.weight.T + model.output.bias
    torch.testing.assert_close(model.logits(decoded.hidden), wanted)


def found_of(model: ConvS2S, source: Source, target: Tensor, valid: Tensor) -> list[Tensor]:
    """Hidden states of all that is no padding, and gradients."""
    hidden = model.decode(model.encode(source), target, valid=valid).hidden[valid]
    trained = [each for name, each in model.named_parameters() if not name.startswith("output.")]
    return [hidden.detach(), *torch.autograd.grad(hidden.sin().sum(), trained)]


@pytest.mark.parametrize("fields", [
    {"kernel": 1}, {"kernel": 2}, {"kernel": 4, "share_attention": True},
    {"heads": 2, "attention": {"cross": {"module": "multihead", "transform": "sparsemax"}}},
    {"attention": {"cross": {"score": "additive"}}}, {"attention": {"cross": {"module": "fixed_memory"}}},
    {"attention": {"cross": {"transform": "sigmoid"}}},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("lengths", [[6, 1, 4], [2, 0, 6], [6, 6, 6]], ids=str)
def test_without_padding_it_is_its_definition(fields, lengths, monkeypatch):
    """Products over windows of sentences end to end, and convolutions of padded rows."""
    model, (source, target) = build(**fields).train(), batch()
    source = Source(source.data, torch.arange(6) < torch.tensor(lengths)[:, None])
    valid = torch.arange(5) < torch.tensor([2, 5, 3])[:, None]
    made, of = [], _windows.Sentences.of
    monkeypatch.setattr(_windows.Sentences, "of", lambda *given: made.append(of(*given)) or made[-1])
    found = found_of(model, source, target, valid)
    assert [each is None for each in made] == [lengths == [6, 6, 6], False]
    monkeypatch.setattr(_windows, "serves", lambda *given: False)
    wanted = found_of(model, source, target, valid)
    assert len(made) == 2
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_dropout_is_where_it_is_with_padding(monkeypatch):
    """Each makes what it is given larger by its own part, instead of by chance."""
    monkeypatch.setattr(Dropout, "forward", lambda self, states: states * (1 + self.p))
    model, (source, target) = build(dropout=0.25, attention_dropout=0.5).train(), batch()
    valid = torch.arange(5) < torch.tensor([2, 5, 3])[:, None]
    found = found_of(model, source, target, valid)
    monkeypatch.setattr(_windows, "serves", lambda *given: False)
    for ours, theirs in zip(found, found_of(model, source, target, valid), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    monkeypatch.setattr(Dropout, "forward", lambda self, states: states)
    assert not torch.allclose(found[0], found_of(model, source, target, valid)[0])


def test_types_are_those_of_padded_rows(monkeypatch):
    model, (source, target) = build().float().train(), batch()
    valid = torch.arange(5) < torch.tensor([2, 5, 3])[:, None]

    def types(half: bool) -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            memory = model.encode(source)
            hidden = model.decode(memory, target, valid=valid).hidden
            return [hidden.dtype, model.logits(hidden).dtype, *(each.values.dtype for each in memory.cross)]

    found = [types(half) for half in (False, True)]
    monkeypatch.setattr(_windows, "serves", lambda *given: False)
    assert found == [types(half) for half in (False, True)]
    assert found[0] != found[1]


@pytest.mark.parametrize("watched", [False, True])
def test_a_convolution_of_ones_own_is_given_padded_rows(watched, monkeypatch):
    """And so is one with a hook, which sees them."""
    seen: list[torch.Size] = []

    class Halved(GatedConvolution):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs.shape)
            return GatedConvolution.forward(self, inputs) / 2

    model, (source, target) = build().train(), batch()
    for layer in [*model.encoder.layers, *model.decoder]:
        if watched:
            layer.register_forward_hook(lambda module, given, out: seen.append(given[0].shape))
        else:
            layer.__class__ = Halved
    valid = torch.arange(5) < torch.tensor([2, 5, 3])[:, None]
    found = found_of(model, source, target, valid)
    assert {shape[0] for shape in seen} == {3}
    monkeypatch.setattr(_windows, "serves", lambda *given: False)
    for ours, theirs in zip(found, found_of(model, source, target, valid), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_padding_of_several_targets_of_one_source():
    model, (source, target) = build(), batch()
    alone = model.encode(Source(source.data[:1], source.valid[:1]))
    valid = torch.arange(5) < torch.tensor([2, 5, 3])[:, None]
    found, wanted = (model.decode(alone, target, valid=each).hidden for each in (valid, None))
    torch.testing.assert_close(found[valid], wanted[valid])


@torch.no_grad()
def test_the_decoder_sees_as_far_back_as_its_kernels_reach():
    """Two layers of kernel 3 read five tokens: the one at 1 reaches the positions 1 to 5, and nothing before it."""
    model = build()
    source, _ = batch()
    target = torch.full((3, 9), 5)
    before = model.decode(model.encode(source), target).hidden
    target[:, 1] = 7
    changed = (model.decode(model.encode(source), target).hidden != before).any(-1)
    assert changed.tolist() == [[1 <= at <= 5 for at in range(9)]] * 3


@torch.no_grad()
def test_what_stands_in_the_padding_is_not_seen():
    model = build()
    source, target = batch()
    source.data[source.data == 13] = 12
    wanted = model.decode(model.encode(source), target).hidden
    model.source_embedding.table.weight[13] = torch.nan
    source.data[~source.valid] = 13
    assert torch.equal(model.decode(model.encode(source), target).hidden, wanted)


@torch.no_grad()
def test_a_source_without_tokens_gives_no_context():
    model = build()
    source, target = batch()
    memory = model.encode(Source(source.data, torch.zeros_like(source.valid)))
    assert not memory.scale.any()
    other = model.encode(Source(source.data.flip(1), torch.zeros_like(source.valid)))
    hidden = model.decode(memory, target).hidden
    assert hidden.isfinite().all()
    assert torch.equal(hidden, model.decode(other, target).hidden)


def every_site() -> list[dict[str, str]]:
    found = []
    for kind in modules.kinds():
        stages = modules.get(kind).stages if "cross" in modules.get(kind).roles else ()
        more = [{"score": score} for score in scores.kinds()] if "score" in stages else [{}] if stages else []
        found += [{"module": kind, **each} for each in more]
    return found


@pytest.mark.parametrize("site", every_site(), ids=lambda site: "-".join(site.values()))
@torch.no_grad()
def test_any_module_and_score(site):
    model = build(heads=2, attention={"default": site})
    source, target = batch()
    decoded = model.decode(model.encode(source, need_weights=True), target, need_weights=True)
    assert decoded.maps is not None
    heads = 2 if site["module"] == "multihead" else 1
    assert [tuple(weights.shape) for weights in decoded.maps["cross"]] == [(3, heads, 5, 6)] * 2
    memory = model.encode(source)
    state = model.start(memory, 5)
    for at in range(5):
        logits, state = model.step(memory, state, target[:, at])
        torch.testing.assert_close(logits, model.logits(decoded.hidden[:, at]))


@torch.no_grad()
def test_low_precision_is_near():
    model = build().float()
    source, target = batch()
    wanted = model.logits(model.decode(model.encode(source), target).hidden)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.logits(model.decode(model.encode(source), target).hidden)
        memory = model.encode(source)
        state = model.start(memory, 5)
        for at in range(5):
            logits, state = model.step(memory, state, target[:, at])
            torch.testing.assert_close(logits, found[:, at], rtol=0.1, atol=0.1)
    torch.testing.assert_close(found.float(), wanted, rtol=0.1, atol=0.1)


def test_variance_is_kept():
    """What the initialisation is for: states neither fade nor grow with depth."""
    torch.manual_seed(0)
    model = parse(layers=8, embedding=64, width=128, dropout=0.1, max_length=60).build(Sizes(500, 500, True)).train()
    tokens = torch.randint(4, 500, (16, 40))
    source = Source(tokens, torch.ones_like(tokens, dtype=torch.bool))
    states = model.encoder.expand(model.source_embedding(tokens))
    deep = model.encoder(model.source_embedding(tokens), source)
    assert 0.5 < deep.std() / states.std() < 2
    hidden = model.decode(model.encode(source), tokens).hidden
    assert 0.5 < hidden.std() / states.std() < 2


def test_dropout_stands_where_it_is_asked_for():
    source, target = batch()
    for name in ("dropout", "attention_dropout"):
        model = build(**{name: 0.5}).train()
        hidden = [model.decode(model.encode(source), target).hidden for _ in range(2)]
        assert not torch.equal(*hidden), name
        model.eval()
        hidden = [model.decode(model.encode(source), target).hidden for _ in range(2)]
        assert torch.equal(*hidden), name


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 3, 5])
@torch.no_grad()
def test_the_state_is_the_last_inputs_of_each_layer(kernel):
    model = build(kernel=kernel, decoder_layers=3)
    source, _ = batch()
    memory = model.encode(source)
    state = model.widen(model.start(memory, 40), 4)
    first = model.expand(model.target_embedding(torch.full((1, 1), 5)))[0, 0]
    for length in range(1, 8):
        _, state = model.step(memory, state, torch.full((12,), 5))
        assert state.length == length
        assert [tuple(kept.shape) for kept in state.inputs] == [(12, kernel - 1, 8)] * 3
        if length == 1 and kernel > 1:
            torch.testing.assert_close(state.inputs[0][0, -1], first)
            assert not state.inputs[0][:, :-1].any()


def test_shared_attention_is_saved_once(tmp_path):
    model, other = build(share_attention=True), build(share_attention=True)
    with torch.no_grad():
        other.output.bias.add_(1)
    save_weights(model, tmp_path / "model.safetensors")
    load_weights(other, tmp_path / "model.safetensors")
    assert sum("attention" in name for name in other.state_dict()) == 4
    assert torch.equal(other.output.bias, model.output.bias)


# ---- spec -----------------------------------------------------------------------------------------------------------


def test_the_score_is_a_plain_dot_product_unless_said():
    spec = parse()
    assert (spec.attention.cross.module.kind, spec.attention.cross.score.kind) == ("single_head", "dot")
    assert parse(attention={"cross": {"transform": "sparsemax"}}).attention.cross.score.kind == "dot"
    assert parse(attention={"default": {"score": "additive"}}).attention.cross.score.kind == "additive"


def test_equal_meaning_equal_digest():
    same = [
        {}, {"attention": {"default": {"score": "dot"}}}, {"attention": {"cross": {"module": "single_head"}}},
        {"kind": "convs2s", "layers": 10},
    ]  # fmt: skip
    assert len({parse(**raw).digest() for raw in same}) == 1
    other = parse(attention={"cross": {"score": "additive"}})
    assert other.digest() != parse().digest()
    assert models.parse(other.dump()) == other
    assert models.parse(other.dump()).digest() == other.digest()
    assert models.parse("convs2s") == parse()


@pytest.mark.parametrize(("raw", "path", "words"), [
    ({"embedding": 10, "heads": 4}, "", "embedding 10 cannot be split over 4 heads"),
    ({"layers": 0}, "layers", "greater than or equal to 1 (given: 0)"),
    ({"kernel": 0}, "kernel", "greater than or equal to 1 (given: 0)"),
    ({"tie": "some"}, "tie", "known: all, decoder, none"),
    ({"widht": 2}, "widht", "did you mean 'width'"),
    ({"attention": {"encoder_self": {}}}, "attention.encoder_self", "unknown key"),
    ({"attention": {"cross": {"module": "none"}}}, "",
     "attention.cross: with the module 'none' a ConvS2S's decoder would know nothing of the source"),
    ({"attention": {"cross": {"module": "none", "score": "additive"}}}, "attention.cross", "has no score"),
])  # fmt: skip
def test_faults_are_told_at_their_path(raw, path, words):
    found = faults(**raw)
    assert list(found) == [path]
    assert words in found[path]


def test_history_needs_a_decoder_that_runs_step_by_step(monkeypatch):
    class Bounded(TransformSpec):
        kind: str = "bounded"
        needs_upper = True

    transforms.kinds()
    monkeypatch.setattr(transforms, "_members", {**transforms._members, "bounded": Bounded})
    (message,) = faults(attention={"cross": {"transform": "bounded"}}).values()
    assert "attention.cross: the transform 'bounded' depends on what was attended before; the ConvS2S sees" in message


@torch.no_grad()
def test_only_a_mean_is_scaled_by_the_length():
    """Rows that sum to 1 give a mean, which shrinks with the source; gates and slots that states are spread over give
    sums."""
    source = Source(torch.tensor([[5, 3, 9, 2]]), torch.ones(1, 4, dtype=torch.bool))
    for cross, averages in (
        ({"transform": "softmax"}, True),
        ({"transform": "sigmoid"}, False),
        ({"module": {"kind": "fixed_memory", "slots": 2}}, False),
        ({"module": {"kind": "fixed_memory", "slots": 2, "enc_norm": "time"}}, True),
        ({"module": {"kind": "fixed_memory", "slots": 2, "enc_norm": "time"}, "transform": "sigmoid"}, False),
    ):
        spec = models.parse({"kind": "convs2s", "layers": 1, "embedding": 4, "width": 4, "attention": {"cross": cross}})
        model = spec.build(Sizes(11, 11, False, 0)).double().eval()
        memory = model.encode(source)
        target = torch.tensor([[1, 4]])
        plain = model.decode(memory, target).hidden
        doubled = model.decode(memory._replace(scale=memory.scale * 2), target).hidden
        assert torch.equal(plain, doubled) != averages


@pytest.mark.parametrize("fields", [{}, {"kernel": 5, "share_attention": True}], ids=str)
@pytest.mark.usefixtures("compiled_products")
@torch.no_grad()
def test_steps_with_packed_weights_are_those_of_the_decoder(fields, monkeypatch):
    model, (source, target) = build(**fields).float(), batch()
    wanted, steps = model.logits(model.decode(model.encode(source), target).hidden), []
    step = packed_steps.PackedWindow._step
    monkeypatch.setattr(packed_steps.PackedWindow, "_step", lambda *given: steps.append(1) or step(*given))
    with packed(model):
        memory = model.encode(source)
        state = model.start(memory, target.shape[1])._replace(compiled=None)  # test_convs2s_step.py has those
        logits = []
        for token in target.unbind(1):
            made, state = model.step(memory, state, token)
            logits.append(made)
    assert len(steps) == target.shape[1] * len(model.decoder)
    torch.testing.assert_close(torch.stack(logits, 1), wanted, rtol=1e-4, atol=1e-5)
