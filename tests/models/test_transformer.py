"""The Transformer: sizes against a formula by hand, its mathematics against torch's own layers, its spec."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.attention.types import Memory
from attnbench.core.ragged import Ragged
from attnbench.core.spec import dotted, problems
from attnbench.models.base import Seq2SeqModel, Sizes, Source, models
from attnbench.models.transformer import PRESETS, Transformer, TransformerSpec
from attnbench.search.base import SpecialIds, searches

JOINT, APART = Sizes(21, 21, joint=True), Sizes(17, 21, joint=False)


def parse(**raw: Any) -> TransformerSpec:
    return TransformerSpec.model_validate(raw)


def build(sizes: Sizes = APART, **raw: Any) -> Transformer:
    torch.manual_seed(1)
    small = {"layers": 2, "width": 8, "heads": 2, "ffn": 12, "dropout": 0.0, "tie": "none"}
    return parse(**{**small, **raw}).build(sizes).double().eval()


def faults(**raw: Any) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        parse(**raw)
    return {dotted(path): message for path, message in problems(caught.value)}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def by_hand(spec: TransformerSpec, sizes: Sizes) -> int:
    """Parameters, from the paper's figures alone."""
    d, f = spec.width, spec.ffn
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    encoder = attention + feed_forward + (1 if spec.shared_norm else 2) * norm
    decoder = 2 * attention + feed_forward + (1 if spec.shared_norm else 3) * norm
    tables = {
        "all": sizes.target_vocab,
        "decoder": sizes.source_vocab + sizes.target_vocab,
        "none": sizes.source_vocab + 2 * sizes.target_vocab,
    }
    return (
        tables[spec.tie] * d
        + (sizes.target_vocab if spec.output_bias else 0)
        + spec.layers * encoder
        + (spec.decoder_layers or spec.layers) * decoder
        + (2 * norm if spec.norm == "pre" else 0)
        + (2 * spec.max_length * d if spec.positions == "learned" else 0)
    )


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("more", [
    {},
    {"norm": "pre", "tie": "decoder"},
    {"positions": "learned", "tie": "none", "max_length": 77, "decoder_layers": 1},
    {"norm": "pre", "tie": "decoder", "shared_norm": True, "output_bias": True},
])  # fmt: skip
def test_parameters_of_every_preset(preset, more):
    spec, sizes = parse(preset=preset, **more), Sizes(5000, 6000 if more else 5000, joint=not more)
    with torch.device("meta"):
        assert count(spec.build(sizes)) == by_hand(spec, sizes)


@pytest.mark.parametrize(("preset", "wanted"), [("base", 63_082_496), ("big", 214_245_376)])
def test_the_models_of_the_paper(preset, wanted):
    """Vaswani et al. 2017, table 3 rounds them to 65 and 213 million; 37,000 joint subwords."""
    with torch.device("meta"):
        assert count(parse(preset=preset).build(Sizes(37000, 37000, joint=True))) == wanted


def test_the_model_of_copy_this_sentence():
    spec = parse(tie="none", positions="learned", max_length=1000, shared_norm=True, output_bias=True)
    with torch.device("meta"):
        assert count(spec.build(Sizes(22110, 22110, joint=False))) == 79_127_134


def test_learned_alpha_is_one_a_head_and_site():
    site = {"transform": {"kind": "entmax", "alpha": "learned"}}
    assert count(build(attention={"default": site})) - count(build()) == 3 * 2 * 2  # sites, layers, heads


def test_decoder_layers():
    model = build(layers=3, decoder_layers=1)
    assert (len(model.encoder), len(model.decoder)) == (3, 1)
    assert len(build(layers=3).decoder) == 3


@pytest.mark.parametrize("tie", ["all", "decoder", "none"])
def test_ties_share_exactly(tie):
    model = build(JOINT, tie=tie)
    source, target = model.source_embedding.table.weight, model.target_embedding.table.weight
    assert (source is target) == (tie == "all")
    assert (model.output.weight is target) == (tie in ("all", "decoder"))
    assert (model.output.weight is source) == (tie == "all")
    with torch.no_grad():
        model.output.weight += 1.0
    assert torch.equal(model.output.weight, target) == (tie != "none")


def test_one_table_needs_one_vocabulary():
    with pytest.raises(ValueError, match="tie 'all' shares one table"):
        parse(tie="all").build(APART)


# ---- mathematics ----------------------------------------------------------------------------------------------------


def copy_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    state = ours.state_dict()
    for part in ("weight", "bias"):
        joined = torch.cat([state[f"project_query.{part}"], state[f"project_memory.{part}"]])
        getattr(theirs, f"in_proj_{part}").data.copy_(joined)
        getattr(theirs.out_proj, part).data.copy_(state[f"project_context.{part}"])


def copy_rest(ours: Any, theirs: Any, norms: list[str]) -> None:
    theirs.linear1.load_state_dict(ours.feed_forward.expand.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.contract.state_dict())
    for number, name in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(getattr(ours, name).norm.state_dict())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("more", [{}, {"shared_norm": True, "output_bias": True}], ids=["", "copy"])
@torch.no_grad()
def test_equals_torchs_own_transformer(norm, more):
    model = build(norm=norm, decoder_layers=1, **more)
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    shape = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0, "batch_first": True,
             "norm_first": norm == "pre"}  # fmt: skip
    source = Source(torch.randint(3, 17, (3, 6)), torch.arange(6) < torch.tensor([6, 2, 4])[:, None])
    target = torch.randint(3, 21, (3, 5))
    states = model.source_embedding(source.data)
    for layer in model.encoder:
        peer = nn.TransformerEncoderLayer(**shape).double().train()  # eval mode takes a path that drops padding
        copy_attention(layer.attention, peer.self_attn)
        copy_rest(layer, peer, ["attention_residual", "feed_forward_residual"])
        states = peer(states, src_key_padding_mask=~source.valid)
    memory = model.encoder_norm(states)
    states = model.target_embedding(target)
    future = nn.Transformer.generate_square_subsequent_mask(5).double()
    for layer in model.decoder:
        peer = nn.TransformerDecoderLayer(**shape).double().train()
        copy_attention(layer.attention, peer.self_attn)
        copy_attention(layer.cross, peer.multihead_attn)
        copy_rest(layer, peer, ["attention_residual", "cross_residual", "feed_forward_residual"])
        states = peer(states, memory, tgt_mask=future, memory_key_padding_mask=~source.valid)
    wanted = model.decoder_norm(states)
    found = model.decode(model.encode(source), target).hidden
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    bias = model.output.bias if more else 0
    torch.testing.assert_close(model.logits(found), wanted @ model.output.weight.T + bias)


@pytest.mark.parametrize("more", [
    {}, {"norm": "pre"}, {"shared_norm": True, "positions": "learned"},
    {"attention": {"cross": {"module": {"kind": "fixed_memory", "slots": 3}}}},
    {"attention": {"encoder_self": {"pattern": {"kind": "window", "n": 2}}, "cross": {"transform": "sparsemax"}}},
])  # fmt: skip
@pytest.mark.parametrize("short", ["both", "source", "target"])
def test_padding_costs_nothing_and_changes_nothing(more, short, monkeypatch):
    """Every projection and feed-forward block sees the tokens alone; what comes out, and its gradient, is the same."""
    model, pad = build(**more), APART.pad
    lengths = torch.tensor([5, 2, 0, 3])
    valid = torch.arange(5) < (lengths if short != "target" else torch.full((4,), 5))[:, None]
    held = torch.arange(5) < (lengths if short != "source" else torch.full((4,), 5))[:, None]
    source = Source(torch.randint(4, 17, (4, 5)).masked_fill(~valid, pad), valid)
    target = torch.randint(4, 21, (4, 5)).masked_fill(~held, pad)
    seen: list[int] = []
    linear = [each for each in [*model.encoder.modules(), *model.decoder.modules()] if isinstance(each, nn.Linear)]
    for each in linear:
        each.register_forward_hook(lambda module, given, out: seen.append(out.numel() // out.shape[-1]))

    def passed() -> list[torch.Tensor]:
        model.zero_grad()
        seen.clear()
        hidden = model.decode(model.encode(source), target, valid=held).hidden
        (hidden[held] * torch.linspace(-1, 1, 8)).sum().backward()
        return [hidden[held].detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    found = passed()
    assert set(seen) == {int(valid.sum()), int(held.sum())}
    assert len(seen) == len(linear)
    monkeypatch.setattr(Ragged, "of", lambda valid: None)
    wanted = passed()
    assert set(seen) == {20}
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_padding_left_out_in_low_precision(monkeypatch):
    model, valid = build().float(), torch.arange(5) < torch.tensor([5, 2, 3])[:, None]
    source, target = Source(torch.randint(4, 17, (3, 5)), valid), torch.randint(4, 21, (3, 5))

    def gradients() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.decode(model.encode(source), target, valid=valid).hidden
        return list(torch.autograd.grad(hidden[valid].float().square().sum(), list(model.encoder.parameters())))

    found = gradients()
    monkeypatch.setattr(Ragged, "of", lambda valid: None)
    for mine, theirs in zip(found, gradients(), strict=True):
        assert (mine - theirs).norm() <= 0.05 * theirs.norm() + 1e-3


def test_the_norm_of_a_layer_is_its_own():
    apart, shared = build(), build(shared_norm=True)
    norms = [[id(m) for m in model.modules() if isinstance(m, nn.LayerNorm)] for model in (apart, shared)]
    assert [len(set(each)) for each in norms] == [2 * 2 + 2 * 3, 2 + 2]


def test_fields_that_came_later_leave_digests_alone():
    assert parse(shared_norm=False, output_bias=False).digest() == parse().digest()
    assert len({parse().digest(), parse(shared_norm=True).digest(), parse(output_bias=True).digest()}) == 3


def test_only_pre_norm_ends_its_stacks_with_a_norm():
    assert isinstance(build(norm="pre").encoder_norm, nn.LayerNorm)
    assert isinstance(build(norm="pre").decoder_norm, nn.LayerNorm)
    assert isinstance(build(norm="post").decoder_norm, nn.Identity)


def test_each_site_has_its_own_choice():
    model = build(attention={"encoder_self": {"transform": {"kind": "topk", "k": 1}},
                             "cross": {"transform": {"kind": "topk", "k": 2}}})  # fmt: skip
    source = Source(torch.randint(3, 17, (2, 6)), torch.ones(2, 6, dtype=torch.bool))
    maps = model.decode(model.encode(source, need_weights=True), torch.randint(3, 21, (2, 4)), need_weights=True).maps
    kept = {
        role: {int(n) for weights in layers for n in (weights > 0).sum(-1).unique()} for role, layers in maps.items()
    }
    assert kept == {"encoder_self": {1}, "decoder_self": {1, 2, 3, 4}, "cross": {2}}


def test_dropout_stands_where_it_is_asked_for():
    source = Source(torch.randint(3, 17, (2, 6)), torch.ones(2, 6, dtype=torch.bool))
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        model = build(**{name: 0.5}).train()
        assert not torch.equal(model.encode(source).cross[0].keys, model.encode(source).cross[0].keys), name
        model.eval()
        assert torch.equal(model.encode(source).cross[0].keys, model.encode(source).cross[0].keys), name
        memory = model.encode(source)
        assert torch.equal(model.decode(memory, source.data).hidden, model.decode(memory, source.data).hidden), name
        model.train()
        assert not torch.equal(model.decode(memory, source.data).hidden, model.decode(memory, source.data).hidden), name
    model = build().train()
    assert torch.equal(model.encode(source).cross[0].keys, model.encode(source).cross[0].keys)


# ---- spec -----------------------------------------------------------------------------------------------------------


def test_a_preset_gives_sizes_and_a_size_beside_it_wins():
    assert parse(preset="tiny").layers == 2
    spec = parse(preset="tiny", width=64, heads=8)
    assert (spec.layers, spec.width, spec.heads, spec.ffn) == (2, 64, 8, 256)
    assert parse() == parse(preset="base")


@pytest.mark.parametrize(("heads", "backend", "words"), [
    (4, {"backend": "flex"}, "encoder_self: it takes heads of a width of 16 and more, and these have 8"),
    (1, {"backend": "triton", "transform": {"kind": "topk", "k": 3}}, None),
    (2, {"backend": "flex"}, None),
])  # fmt: skip
def test_kernels_that_do_not_take_heads_of_a_width_are_refused(heads, backend, words):
    """They had been computed by the definition, under their name."""
    raw = {"width": 32, "heads": heads, "attention": {"encoder_self": backend}}
    if words is None:
        parse(**raw)
    else:
        with pytest.raises(ValidationError, match=words):
            parse(**raw)
    own = {"backend": "triton", "transform": "sparsemax"}
    wide = {"width": 512, "heads": 2, "attention": {"encoder_self": own}}
    with pytest.raises(
        ValidationError,
        match="encoder_self: it takes heads of a width of 128 at most, and these have 256",
    ):
        parse(**wide)
    whole = {"width": 512, "heads": 8, "attention": {"cross": {**own, "module": "single_head"}}}
    with pytest.raises(ValidationError, match="cross: it takes heads of a width of 128 at most, and these have 512"):
        parse(**whole)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_and_its_sizes_are_one_spec(preset):
    short, long = parse(preset=preset), parse(**PRESETS[preset])
    assert short == long
    assert short.digest() == long.digest()
    assert "preset" not in short.dump()  # it would be wrong beside other sizes
    again = models.parse(short.dump())
    assert again == short
    assert again.digest() == short.digest()


def test_the_document_of_presets_is_right():
    text = TransformerSpec.model_fields["preset"].description or ""
    for name, sizes in PRESETS.items():
        assert f"{name} {sizes['layers']}x{sizes['width']}" in text


@pytest.mark.parametrize(("raw", "path", "words"), [
    ({"preset": "tyni"}, "preset", "did you mean 'tiny'"),
    ({"width": 10, "heads": 4}, "", "width 10 cannot be split over 4 heads"),
    ({"preset": "tiny", "heads": 3}, "", "width 128 cannot be split over 3 heads"),
    ({"layers": 0}, "layers", "greater than or equal to 1 (given: 0)"),
    ({"layers": "2"}, "layers", "integer (given: '2')"),
    ({"dropout": 1.0}, "dropout", "less than 1"),
    ({"norm": "both"}, "norm", "known: pre, post"),
    ({"lyers": 2}, "lyers", "did you mean 'layers'"),
    ({"attention": {"cros": {}}}, "attention.cros", "did you mean 'cross'"),
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
    assert "attention.cross: the transform 'bounded' depends on what was attended before" in message


# ---- fixed-size memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("padding_left_out", [True, False])
@torch.no_grad()
def test_decoding_with_fixed_memory_touches_no_encoder_state(beams, padding_left_out, monkeypatch):
    """Every tensor that the encoder made is overwritten; the slots are all that is left."""
    if not padding_left_out:
        monkeypatch.setattr(Ragged, "of", lambda valid: None)
    made: list[torch.Tensor] = []
    real = Ragged.pad_parts
    monkeypatch.setattr(Ragged, "pad_parts", lambda *given: [made.append(each) or each for each in real(*given)])
    model = build(
        attention={"cross": {"module": {"kind": "fixed_memory", "slots": 3, "positions": True, "longest": 4}}}
    )
    source = Source(torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]]), torch.tensor([[True] * 4, [True, True, False, False]]))
    token = torch.full((2 * beams,), 1)

    def decode(memory):
        state, found = model.widen(model.start(memory, 3), beams), []
        for _ in range(3):
            logits, state = model.step(memory, state, token)
            found.append(logits)
        return torch.stack(found)

    wanted = decode(model.encode(source))
    made.clear()
    watched = [*model.encoder.modules(), *model.source_embedding.modules(), model.encoder_norm]
    hooks = [part.register_forward_hook(lambda *call: made.append(call[-1])) for part in watched]
    memory = model.encode(source)
    for hook in hooks:
        hook.remove()
    states = [each for each in made if isinstance(each, torch.Tensor)]
    assert any(each.shape == (2, 4, 8) for each in states)
    for each in states:
        each.fill_(torch.nan)
    source.valid.fill_(False)
    assert torch.equal(decode(memory), wanted)


def test_fixed_memory_refuses_what_needs_bounds(monkeypatch):
    class Bounded(TransformSpec):
        kind: str = "bounded"
        needs_upper = True

    transforms.kinds()
    monkeypatch.setattr(transforms, "_members", {**transforms._members, "bounded": Bounded})
    module = {"kind": "fixed_memory", "encoder_transform": "bounded"}
    found = faults(attention={"cross": {"module": module}})
    assert list(found) == ["attention.cross.module"]
    bounded = {"kind": "lstm", "attention": {"cross": {"module": "fixed_memory", "transform": "bounded"}}}
    with pytest.raises(ValueError, match="the transform 'bounded' needs what each source position has received"):
        models.parse(bounded)  # a model that steps admits such a transform, but not over slots


def test_a_beam_moves_what_an_attention_says_that_its_cache_holds(monkeypatch):
    model = build(Sizes(9, 9, False), layers=2, width=16, heads=2, ffn=16, tie="none").eval()
    memory = model.encode(Source(torch.randint(3, 9, (1, 4)), torch.ones(1, 4).bool()))
    state = model.widen(model.start(memory, 5), 3)
    running = torch.arange(3.0).view(3, 1, 1, 1)
    monkeypatch.setattr(model.decoder[1].attention, "held", lambda cache, shared: [running])
    model.reorder(state, torch.tensor([2, 1, 0]), 0)
    assert running.flatten().tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("size", [2, 4])
def test_beams_move_what_differs_alone_and_find_the_same(seed, size, monkeypatch):
    """Small vocabularies and sharp outputs: places that end, stand empty, and descend from one another."""
    torch.manual_seed(seed)
    vocabulary = 5 + 9 * (seed % 2)
    model = build(Sizes(vocabulary, vocabulary, False), layers=2, width=16, heads=2, ffn=16, tie="none").eval()
    with torch.no_grad():
        model.output.weight.mul_(1 + 2 * (seed % 5))
    tokens = torch.randint(3, vocabulary, (4, 9))
    source = Source(tokens, torch.arange(9) < torch.tensor([[9], [5], [1], [8]]))
    search = searches.parse({"kind": "beam", "size": size, "n_best": size, "max_ratio": 2.0, "max_extra": 12}).build()
    special = SpecialIds(bos=1, eos=2, pad=0)
    found = search(model, source, special)
    moved, kept = [], []
    wholly, anew = Seq2SeqModel.reorder, Seq2SeqModel.keep
    monkeypatch.setattr(Transformer, "reorder", lambda *given: moved.append(given[-1]) or wholly(*given))
    monkeypatch.setattr(Transformer, "keep", lambda *given: kept.append(given[-1]) or anew(*given))
    assert search(model, source, special) == found
    assert moved
    assert kept or (size == 2 and vocabulary > 5)  # where all sources run to the limit, and none leaves before another


class More(NamedTuple):
    """A State with a field of its own."""

    length: int
    caches: tuple[Memory, ...]
    beams: int
    received: Any
    compiled: Any
    told: torch.Tensor


@torch.no_grad()
def test_models_made_of_this_one_keep_what_else_they_hold():
    class Own(Transformer):
        pass

    class Reordered(Transformer):
        def reorder(self, state, rows, shared):
            return Seq2SeqModel.reorder(self, state, rows, shared)

    sources, rows = torch.tensor([2, 1]), torch.tensor([4, 5, 3, 2])
    for kind in (Own, Reordered):
        model = build(Sizes(9, 9, False), layers=1, width=16, heads=2, ffn=16, tie="none").eval()
        model.__class__ = kind
        memory = model.encode(Source(torch.randint(3, 9, (3, 4)), torch.ones(3, 4).bool()))
        state = More(*model.widen(model.start(memory, 5), 2), torch.arange(6))
        for token in range(3, 6):  # another one in each row
            _, stepped = model.step(memory, state, 3 + (torch.arange(6) + token) % 6)
            state = More(*stepped[:5], state.told)
        caches, sides = ([each[:, :, :3].clone() for each in held[0][:2]] for held in (state.caches, memory.cross))
        memory, kept = model.keep(memory, state, sources, rows)
        assert kept.told.tolist() == rows.tolist()
        for found, before, picked in ((kept.caches, caches, rows), (memory.cross, sides, sources)):
            assert before[0].unique(dim=0).shape[0] == len(before[0])
            assert all(torch.equal(each[:, :, :3], was[picked]) for each, was in zip(found[0][:2], before, strict=True))
