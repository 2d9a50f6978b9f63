"""The recurrent models against their equations written out step by step, and the parameter counts of the papers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.attention import cached
from attnbench.core import native, packed_steps
from attnbench.core.bfloat16 import multiplies_bfloat16
from attnbench.core.packed import packed
from attnbench.models import _cells, recurrent
from attnbench.models.base import Sizes, Source, models
from attnbench.models.recurrent import Recurrent

PAD, VOCABULARY, WIDTH, EMBEDDING = 0, 11, 4, 3
SIZES = Sizes(VOCABULARY, VOCABULARY, False, PAD)
SOURCE = torch.tensor([[5, 3, 9, 2], [7, 2, PAD, PAD]])
LENGTHS = (4, 2)
TARGET = torch.tensor([[1, 4, 6], [1, 8, 3]])
KINDS = pytest.mark.parametrize("kind", ["lstm", "gru"])


BOUNDED: dict[str, Any] = {"pattern": {"kind": "random", "n": 2}, "transform": "csparsemax"}


def build(raw: dict[str, Any]) -> Recurrent:
    torch.manual_seed(2)
    spec = models.parse({"layers": 2, "width": WIDTH, "embedding": EMBEDDING, "dropout": 0.0, **raw})
    model = spec.build(SIZES).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6)
    assert isinstance(model, Recurrent)
    return model


def found(model: Recurrent) -> Tensor:
    source = Source(SOURCE, torch.arange(SOURCE.shape[1]) < torch.tensor(LENGTHS)[:, None])
    return model.logits(model.decode(model.encode(source), TARGET).hidden)


# ---- the definition: one sentence, one step and one layer at a time --------------------------------------------------


def cell_of(layers: nn.RNNBase, suffix: str):
    """One step of the layer whose parameters end in `suffix`: torch's gates written out."""
    w, u, b, d = (getattr(layers, f"{name}_{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))

    def lstm(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        i, f, g, o = (w @ x + b + u @ state[0] + d).chunk(4)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def gru(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (r, z, n), (ur, uz, un) = (w @ x + b).chunk(3), (u @ state[0] + d).chunk(3)
        z = torch.sigmoid(z + uz)
        return ((1 - z) * torch.tanh(n + torch.sigmoid(r + ur) * un) + z * state[0],)

    return lstm if isinstance(layers, nn.LSTM) else gru


def nothing(layers: nn.RNNBase) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(WIDTH).double() for _ in range(2 if isinstance(layers, nn.LSTM) else 1))


def encode(model: Recurrent, tokens: list[int]) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """States of the last layer, and what each decoder layer starts from."""
    layers = model.encoder.layers
    outputs = [model.encoder.table.weight[token] for token in tokens]
    ends: list[tuple[Tensor, ...]] = []
    for number in range(2):
        sides = []
        for suffix, order in (("", 1), ("_reverse", -1))[: 2 if model.spec.bidirectional else 1]:
            step, state, made = cell_of(layers, f"l{number}{suffix}"), nothing(layers), []
            for x in outputs[::order]:
                state = step(x, state)
                made.append(state[0])
            sides.append((made[::order], state))
        outputs = [torch.cat(parts) for parts in zip(*(side[0] for side in sides), strict=True)]
        ends.append(tuple(torch.cat(parts) for parts in zip(*(side[1] for side in sides), strict=True)))
    if model.spec.bidirectional:  # first the bridges of every layer's h, then those of every layer's c
        bridges = list(model.encoder.bridges)
        ends = [
            tuple(torch.tanh(bridges[part * 2 + number](end[part])) for part in range(len(end)))
            for number, end in enumerate(ends)
        ]
    return outputs, ends


def attend(model: Recurrent, query: Tensor, states: list[Tensor]) -> Tensor:
    score: Any = model.attention.score
    scores = [
        score.vector[0] @ torch.tanh(query @ score.query_weight[0] + state @ score.key_weight[0] + score.bias[0, 0])
        for state in states
    ]
    weights = torch.softmax(torch.stack(scores), 0)
    return sum((w * state for w, state in zip(weights, states, strict=True)), torch.zeros(())).double()


def wanted(model: Recurrent, tokens: list[int], target: list[int]) -> Tensor:
    spec = model.spec
    attends = spec.attention.cross.module.kind != "none"
    states, carried = encode(model, tokens)
    fed, rows = torch.zeros(model.fed_width).double(), []
    for token in target:
        embedded = model.table.weight[token]
        context = torch.zeros(0).double()
        if spec.query == "previous":
            fed = context = attend(model, carried[-1][0], states)
        x = torch.cat([embedded, fed])
        for number in range(2):
            carried[number] = cell_of(model.decoder, f"l{number}")(x, carried[number])
            x = carried[number][0]
        if spec.query == "current" and attends:
            context = attend(model, x, states)
        read = x
        if model.attentional is not None:
            read = torch.tanh(model.attentional.weight @ torch.cat([context, x]) + model.attentional.bias)
        elif spec.readout == "concat":
            read = torch.cat([x, context, embedded])
        if spec.query == "current":
            fed = {"none": fed, "attentional": read, "context": context}[spec.input_feeding]
        rows.append(model.output.weight @ read + model.output.bias)
    return torch.stack(rows)


@KINDS
@pytest.mark.parametrize("raw", [
    {"attention": {"cross": {"module": "none"}}, "readout": "state"},
    {"attention": {"cross": {"module": "none"}}},
    {},
    {"bidirectional": True},
    {"readout": "concat"},
    {"input_feeding": "attentional"},
    {"input_feeding": "context", "readout": "concat", "bidirectional": True},
    {"query": "previous", "readout": "concat", "bidirectional": True},
    {"query": "previous", "readout": "state"},
    {"query": "previous"},
], ids=lambda raw: "-".join(str(value) for value in raw.values()) or "plain")  # fmt: skip
@torch.no_grad()
def test_equals_the_equations(kind, raw):
    model = build({"kind": kind, **raw})
    logits = found(model)
    for row, length in enumerate(LENGTHS):
        by_hand = wanted(model, SOURCE[row, :length].tolist(), TARGET[row].tolist())
        torch.testing.assert_close(logits[row], by_hand, rtol=0, atol=1e-12)


@KINDS
@pytest.mark.parametrize("raw", [
    {"input_feeding": "attentional"},
    {"input_feeding": "context", "readout": "concat", "bidirectional": True},
    {"query": "previous", "readout": "concat", "bidirectional": True},
    {"attention": {"cross": {"module": "none"}}, "readout": "state"},
], ids=lambda raw: "-".join(str(value) for value in raw.values()))  # fmt: skip
def test_gradients_are_those_of_the_layers_of_torch(kind, raw, monkeypatch):
    model, reads, loops = build({"kind": kind, **raw}), [], []
    read, steps = _cells.read, _cells.Steps
    monkeypatch.setattr(_cells, "read", lambda *given: (reads.append(1), read(*given))[1])
    monkeypatch.setattr(_cells, "Steps", lambda *given: (loops.append(1), steps(*given))[1])
    mine = found(model)
    assert reads == [1]
    assert len(loops) == (not model.at_once)
    monkeypatch.setattr(_cells, "serves", lambda *given: False)
    theirs = found(model)
    assert len(reads) + len(loops) == 1 + (not model.at_once)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    upstream, of = torch.randn_like(mine), dict(model.named_parameters())
    slopes = (torch.autograd.grad(each, list(of.values()), upstream) for each in (mine, theirs))
    for name, own, other in zip(of, *slopes, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11, msg=name)


@KINDS
@pytest.mark.parametrize(("raw", "cross"), [
    ({"input_feeding": "attentional"}, {"score": "additive"}),
    ({"input_feeding": "attentional"}, {"score": "dot"}),
    ({"input_feeding": "attentional"}, {"score": "bilinear", "coverage": "neural"}),
    ({"query": "previous", "bidirectional": True}, {"score": "additive"}),
    ({"query": "previous", "bidirectional": True}, {"score": "bilinear", "transform": "sparsemax"}),
], ids=["additive", "dot", "coverage", "previous", "sparsemax"])  # fmt: skip
def test_gradients_of_what_all_steps_read_are_those_of_the_definition(kind, raw, cross, monkeypatch):
    monkeypatch.setattr(cached, "_LEAST", 1)
    model, gathered, made = build({"kind": kind, **raw, "attention": {"cross": cross}}).float(), [], recurrent.gathered
    monkeypatch.setattr(recurrent, "gathered", lambda held: gathered.append(1) or made(held))
    mine = found(model)
    assert len(gathered) == 2  # keys and values
    with native.off():
        theirs = found(model)
    assert len(gathered) == 2
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    upstream, of = torch.randn_like(mine), dict(model.named_parameters())
    slopes = (torch.autograd.grad(each, list(of.values()), upstream) for each in (mine, theirs))
    for name, own, other in zip(of, *slopes, strict=True):
        assert float((own - other).norm()) <= 1e-5 * max(float(other.norm()), 1.0), name


@KINDS
@pytest.mark.parametrize("score", ["additive", "bilinear"])
def test_who_looks_at_attention_finds_gradients_of_what_it_takes(kind, score, monkeypatch):
    monkeypatch.setattr(cached, "_LEAST", 1)
    model, taken = build({"kind": kind, "input_feeding": "context", "attention": {"cross": {"score": score}}}), []
    model.float().attention.register_forward_pre_hook(lambda _, given: taken.extend(given[1][:2]))
    upstream = torch.randn_like(found(model))
    slopes = []
    for defined in (False, True):
        taken.clear()
        with native.off() if defined else contextlib.nullcontext():
            made = found(model)
        slopes.append(torch.autograd.grad(made, taken[:2], upstream))
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_decoder_that_nobody_learns_through_gathers_nothing(monkeypatch):
    model = build({"kind": "gru", "input_feeding": "attentional"})
    monkeypatch.setattr(recurrent, "gathered", None)
    model.encoder.requires_grad_(False)
    model.attention.requires_grad_(False)
    found(model).sum().backward()


@KINDS
@pytest.mark.skipif(not multiplies_bfloat16(torch.device("cpu")), reason="this processor multiplies no bfloat16")
def test_in_bfloat16_all_steps_read_float32(kind, monkeypatch):
    read = []
    monkeypatch.setattr(recurrent, "gathered", lambda held: read.append(held.dtype) or held)
    model = build({"kind": kind, "input_feeding": "attentional"}).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.decode(model.encode(Source(SOURCE, torch.ones_like(SOURCE, dtype=torch.bool))), TARGET)
    assert read == [torch.float32, torch.float32]


@KINDS
def test_rows_of_one_length_are_left_to_torch(kind, monkeypatch):
    model = build({"kind": kind})
    monkeypatch.setattr(_cells, "read", None)
    model.encode(Source(SOURCE, torch.ones_like(SOURCE, dtype=torch.bool)))


@KINDS
def test_steps_of_a_target_are_taken_together_only_where_they_may_be(kind):
    assert build({"kind": kind}).at_once
    assert not build({"kind": kind, "input_feeding": "attentional"}).at_once
    assert not build({"kind": kind, "query": "previous"}).at_once


@pytest.mark.parametrize(("raw", "count"), [
    ({"kind": "lstm", "layers": 2, "width": 512, "embedding": 256, "readout": "state",
      "attention": {"cross": {"module": "none"}}}, 30_019_166),
    ({"kind": "gru", "layers": 1, "width": 512, "embedding": 256, "bidirectional": True, "query": "previous",
      "readout": "concat"}, 57_396_830),
], ids=["lstm", "gru"])  # fmt: skip
def test_parameters_of_the_copy_paper(raw, count):
    """Copy This Sentence, table 1, at its vocabulary of 22,110; for the GRU it prints 1,024 more."""
    with torch.device("meta"):
        model = models.parse(raw).build(Sizes(22_110, 22_110, False, PAD))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@KINDS
@pytest.mark.parametrize(("raw", "words"), [
    ({"query": "previous", "input_feeding": "context"}, "drop input_feeding"),
    ({"input_feeding": "attentional", "readout": "concat"}, "take `input_feeding: context` or `readout: attentional`"),
    ({"readout": "state"}, "the context would go nowhere"),
    ({"query": "previous", "attention": {"cross": {"module": "none"}}}, "gives no context"),
    ({"input_feeding": "context", "attention": {"cross": {"module": "none"}}}, "gives no context"),
    ({"bidirectional": True, "attention": {"cross": {"score": "dot"}}}, "keys of width 1024"),
    ({"attention": {"encoder_self": {"transform": "topk"}}}, "unknown key 'encoder_self'"),
    ({"attention": {"cross": BOUNDED}, "fertility": {"kind": "constant", "value": 3.0}}, "'random' may leave out EOS"),
])  # fmt: skip
def test_what_cannot_be_is_refused_when_read(kind, raw, words):
    with pytest.raises(ValueError, match=words):
        models.parse({"kind": kind, **raw})


@KINDS
def test_heads_that_project_keys_of_both_directions_are_as_wide_as_queries(kind):
    cross = {"module": "multihead", "score": "scaled_dot", "transform": "sparsemax", "backend": "triton"}
    models.parse({"kind": kind, "width": 128, "bidirectional": True, "attention": {"cross": cross}})


@KINDS
def test_bounds_that_saturate_may_stand_under_a_pattern(kind):
    cross = {**BOUNDED, "transform": {"kind": "csparsemax", "on_infeasible": "saturate"}}
    models.parse({"kind": kind, "attention": {"cross": cross}, "fertility": {"kind": "constant", "value": 3.0}})


@KINDS
@pytest.mark.parametrize("score", ["dot", "scaled_dot", "bilinear", "additive"])
def test_every_score_stands_in_it(kind, score):
    model = build({"kind": kind, "attention": {"cross": {"score": score}}})
    assert found(model).isfinite().all()


@KINDS
def test_training_drops_out_and_evaluation_does_not(kind):
    model = build({"kind": kind, "dropout": 0.5})
    assert torch.equal(found(model), found(model))
    model.train()
    assert not torch.equal(found(model), found(model))


@KINDS
@pytest.mark.skipif(not multiplies_bfloat16(torch.device("cpu")), reason="this processor multiplies no bfloat16")
def test_bfloat16_is_close_to_float32(kind):
    kinds = [{"attention": {"cross": {"score": score}}} for score in ("dot", "bilinear", "additive")]
    for raw in ({"query": "previous"}, {"input_feeding": "attentional"}, *kinds):
        model = build({"kind": kind, **raw}).float()
        plain = found(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = found(model)
        torch.testing.assert_close(low.float(), plain, rtol=0.1, atol=0.15)


@KINDS
@pytest.mark.parametrize("score", ["additive", "bilinear"])
@pytest.mark.parametrize("coverage", ["simple", "linguistic", "neural"])
def test_with_and_without_coverage_what_both_have_begins_alike(kind, score, coverage):
    def weights(**more: Any) -> dict[str, Tensor]:
        torch.manual_seed(2)
        raw = {"kind": kind, "layers": 1, "width": WIDTH, "attention": {"cross": {"score": score, **more}}}
        return models.parse(raw).build(SIZES).state_dict()

    plain, covered = weights(), weights(coverage=coverage)
    assert len(covered) > len(plain)
    assert all(torch.equal(covered[name], plain[name]) for name in plain)


@pytest.mark.parametrize("fields", [
    {"attention": {"cross": {"score": "additive"}}, "query": "previous"},
    {"attention": {"cross": {"score": "additive", "transform": "sparsemax"}}, "input_feeding": "attentional"},
    {"attention": {"cross": {"module": "none"}}},
], ids=str)  # fmt: skip
@KINDS
@pytest.mark.usefixtures("compiled_products")
@torch.no_grad()
def test_steps_with_packed_weights_are_those_of_the_decoder(kind, fields, monkeypatch):
    model = build({"kind": kind, **fields}).float()
    wanted, steps = found(model), []
    step = getattr(packed_steps, f"_{kind}")
    monkeypatch.setattr(packed_steps, f"_{kind}", lambda *given: steps.append(1) or step(*given))
    source = Source(SOURCE, torch.arange(SOURCE.shape[1]) < torch.tensor(LENGTHS)[:, None])
    with packed(model):
        memory = model.encode(source)
        state, logits = model.start(memory, 3), []
        for token in TARGET.unbind(1):
            made, state = model.step(memory, state, token)
            logits.append(made)
    assert len(steps) == 3 * 2  # of each layer
    torch.testing.assert_close(torch.stack(logits, 1), wanted, rtol=1e-4, atol=1e-5)
