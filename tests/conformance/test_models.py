"""The laws of a sequence-to-sequence model (models/base.py), for every model with every transform of the registries."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from model_cases import (
    BOS,
    BOUNDED,
    CASES,
    EACH,
    EOS,
    LENGTHS,
    LOOKING_BACK,
    PAD,
    PLAIN,
    PRECISION,
    TARGETS,
    VOCABULARY,
    WITH_MEMORY,
    batch,
    build,
    close,
    fitted,
    logits,
    roles,
    small,
    tokens,
    with_fertility,
)
from pydantic import ValidationError
from torch import Tensor, nn

from attnbench.attention.biases.base import biases
from attnbench.attention.coverage.base import coverages
from attnbench.attention.patterns.base import patterns
from attnbench.attention.scores.base import scores
from attnbench.attention.transforms.base import transforms
from attnbench.core.errors import AttnbenchError
from attnbench.core.packed import pack
from attnbench.core.tree import expand_batch, map_batch, select_batch
from attnbench.models.base import Sizes, Source, models
from attnbench.search.base import SpecialIds, searches
from attnbench.train.state import load_weights, save_weights

CONSTANT = ("exhaustion",)
"""Mechanisms of which a part has no gradient by their definition."""


def shapes(tree: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    map_batch(note, tree)
    return found


def test_every_mechanism_stands_in_some_model():
    used = str(["full", *(case.values[0] for case in CASES)])  # every key, where no pattern is named
    missing = [
        f"{family.noun} {kind}"
        for family in (biases, coverages, patterns, scores, transforms)
        for kind in family.kinds()
        if f"'{kind}'" not in used
    ]
    assert missing == [], "add cases with them in tests/cases/model_cases.py, as PATTERNED is"


@EACH
@PRECISION
@torch.no_grad()
def test_step_equals_decode(raw, dtype, tolerance):
    model = build(raw, dtype)
    source, target_in, _ = batch()
    whole = logits(model, source, target_in)
    memory = model.encode(source)
    state = model.start(memory, target_in.shape[1])
    for at in range(target_in.shape[1]):
        found, state = model.step(memory, state, target_in[:, at])
        close(found, whole[:, at], tolerance)


@pytest.mark.parametrize("kind", models.kinds())
def test_padding_belongs_to_its_target(kind):
    model, (source, target_in, _) = build({"kind": kind, **small(kind)[0]}), batch()
    for other in (target_in[:, 1:], target_in[1:]):
        with pytest.raises(ValueError, match=r"valid \(.*\) does not belong to a target \("):
            model.decode(model.encode(source), target_in, valid=other > 0)


@EACH
@PRECISION
@pytest.mark.parametrize(
    ("sources", "rows"), [([0, 2], [1, 1, 0, 8, 6, 8]), ([2, 1], [7, 6, 6, 4, 4, 3])], ids=["in order", "closed up"]
)
@torch.no_grad()
def test_step_with_beams_equals_decode(raw, dtype, tolerance, sources, rows):
    """Three prefixes a source share its Memory; halfway a source leaves, and beams change places. Weights of float32
    are packed, as in a search."""
    model, beams = build(raw, dtype), 3
    source, _, _ = batch()
    prefixes = torch.randint(3, VOCABULARY, (len(LENGTHS) * beams, 5), generator=torch.Generator().manual_seed(4))
    prefixes[:, 0] = BOS
    whole = logits(model, Source(*(expand_batch(part, beams) for part in (source.data, source.valid))), prefixes)
    pack(model)
    memory = model.encode(source)
    state = model.widen(model.start(memory, 5), beams)
    for at in range(3):
        found, state = model.step(memory, state, prefixes[:, at])
        close(found, whole[:, at], tolerance)
    sources, rows = torch.tensor(sources), torch.tensor(rows)  # the third source is finished
    memory, state = model.keep(memory, state, sources, rows)
    later = torch.cat([prefixes[rows, :3], prefixes[torch.arange(6), 3:]], dim=1)
    places = torch.tensor([2, 0, 0, 3, 5, 4])
    state = model.reorder(state, places, 0)
    later = torch.cat([later[places, :3], later[:, 3:]], dim=1)
    left = Source(*(each[sources].repeat_interleave(beams, 0) for each in (source.data, source.valid)))
    whole = logits(model, left, later)
    for at in range(3, 5):
        found, state = model.step(memory, state, later[:, at])
        close(found, whole[:, at], tolerance)


@EACH
@PRECISION
@torch.no_grad()
def test_padding_and_batch_composition_change_nothing(raw, dtype, tolerance):
    model = build(raw, dtype)
    source, target_in, valid = batch()
    together = logits(model, source, target_in)
    wide = Source(*tokens(LENGTHS, 1, width=11))
    wide.data[:, : source.data.shape[1]] = source.data
    wide.data[~wide.valid] = 5  # padding may hold any token
    junk = torch.cat([target_in.masked_fill(~valid, 7), torch.full((len(TARGETS), 3), 9)], dim=1)
    padded = logits(model, wide, junk)[:, : target_in.shape[1]]
    for row, (length, target) in enumerate(zip(LENGTHS, TARGETS, strict=True)):
        own = Source(source.data[row : row + 1, :length], source.valid[row : row + 1, :length])
        alone = logits(model, own, target_in[row : row + 1, :target])[0]
        close(alone, together[row, :target], tolerance)
        close(alone, padded[row, :target], tolerance)


@pytest.mark.parametrize("raw", PLAIN)
def test_padding_gets_no_gradient(raw):
    model = build(fitted(raw, tie="none"))
    source, target_in, valid = batch()
    source.data[~source.valid], target_in[~valid] = 11, 12  # tokens that stand nowhere else
    for ids, own in ((source.data, source.valid), (target_in, valid)):
        ids[own & (ids >= 11)] = 10
    logits(model, source, target_in)[valid].log_softmax(-1)[:, 4].sum().backward()
    assert isinstance(model, nn.Module)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabularies = [table for table in tables if table.num_embeddings == VOCABULARY]
    assert len(vocabularies) >= 2
    for table in vocabularies:
        assert table.weight.grad is not None
        assert not table.weight.grad[11:].any()
        assert table.weight.grad[3:11].any()


@EACH
@torch.no_grad()
def test_dimension_zero_is_the_row(raw):
    model = build(raw)
    source, target_in, _ = batch()
    memory = model.encode(source)
    assert shapes(memory)
    assert {shape[0] for shape in shapes(memory)} == {len(LENGTHS)}
    for beams in (1, 4):
        state = model.widen(model.start(memory, 6), beams)
        for _ in range(2):
            assert shapes(state)
            assert {shape[0] for shape in shapes(state)} == {len(LENGTHS) * beams}
            _, state = model.step(memory, state, expand_batch(target_in[:, 0], beams))


@pytest.mark.parametrize("raw", WITH_MEMORY)
@torch.no_grad()
def test_what_decoding_with_fixed_memory_reads_does_not_grow_with_the_source(raw):
    model = build(raw)
    memories = [model.encode(Source(*tokens((length, 2), 1))) for length in (3, 12)]
    assert shapes(memories[0]) == shapes(memories[1])
    wide, few = model.encode(Source(*tokens((12, 2), 1)), need_weights=True), memories[1]
    assert len(shapes(wide)) > len(shapes(few))  # only maps ask for more


@pytest.mark.parametrize("raw", WITH_MEMORY)
@torch.no_grad()
def test_decoding_with_fixed_memory_needs_no_encoder_state(raw):
    """A model that never read the source decodes from a copy of the slots, when the encoder and its states are gone."""
    model, other = build(raw), build(raw)
    other.load_state_dict(model.state_dict())
    source, target_in, _ = batch()
    wanted = model.decode(model.encode(source), target_in).hidden
    memory = select_batch(model.encode(source), torch.arange(len(LENGTHS)))
    del model, source
    assert torch.equal(other.decode(memory, target_in).hidden, wanted)
    state = other.start(memory, target_in.shape[1])
    for at in range(target_in.shape[1]):
        found, state = other.step(memory, state, target_in[:, at])
        close(found, other.logits(wanted[:, at]))


@EACH
@torch.no_grad()
def test_select_batch_commutes_with_decode(raw):
    model = build(raw)
    source, target_in, _ = batch()
    index = torch.tensor([2, 0, 0])
    found = model.decode(select_batch(model.encode(source), index), target_in[index]).hidden
    close(found, model.decode(model.encode(source), target_in).hidden[index])


@EACH
def test_padding_of_the_target_may_be_left_out(raw):
    """Values and gradients; what stands at padding means nothing."""
    model = build(raw)
    source, target_in, valid = batch()
    found = model.decode(model.encode(source), target_in, valid=valid).hidden[valid]
    wanted = model.decode(model.encode(source), target_in).hidden[valid]
    close(found, wanted)
    upstream = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view_as(wanted)
    given = list(model.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(found, given, upstream, allow_unused=True),
        torch.autograd.grad(wanted, given, upstream, allow_unused=True), strict=True,
    ):  # fmt: skip
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            close(mine, theirs)


@EACH
def test_gradients_reach_every_parameter_and_are_finite(raw):
    model = build(raw).train()
    source, target_in, valid = batch()
    nn.functional.cross_entropy(logits(model, source, target_in)[valid], target_in[valid]).backward()
    for label, parameter in model.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.isfinite().all(), label
        assert parameter.grad.any(), label


@pytest.mark.parametrize("raw", PLAIN)
def test_the_future_of_the_target_is_hidden(raw):
    model = build(raw)
    source, target_in, _ = batch()
    before = logits(model, source, target_in)
    target_in[:, 3:] = 9
    after = logits(model, source, target_in)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@EACH
@torch.no_grad()
def test_weights_of_every_site_are_told_when_asked_for(raw):
    """They sum to 1 but where a gate, or a module whose weights are products of two sides, says otherwise."""
    model, sites = build(raw), models.parse(raw).attention  # pyright: ignore
    source, target_in, valid = batch()
    assert model.decode(model.encode(source), target_in).maps is None
    decoded = model.decode(model.encode(source, need_weights=True), target_in, need_weights=True)
    close(decoded.hidden, model.decode(model.encode(source), target_in).hidden)
    assert decoded.maps is not None
    assert set(decoded.maps) == roles(raw["kind"])
    keys = {"encoder_self": source.valid, "decoder_self": None, "cross": source.valid}
    for role, maps in decoded.maps.items():
        assert maps or not sites.site(role).module.stages, role
        own, mask = (source.valid if role == "encoder_self" else valid), keys[role]
        site = sites.site(role)
        for weights in maps:
            sums = weights.sum(-1).transpose(1, 2)[own]
            if site.module.averages and site.transform.rows == "simplex":
                close(sums, torch.ones_like(sums))
            assert (sums > 0).all()
            assert (weights >= 0).all()
            if mask is not None:
                assert not weights.masked_select(~mask[:, None, None, :]).any()
            else:
                assert not weights.triu(1).any()


@EACH
@torch.no_grad()
def test_what_was_received_is_the_sum_of_the_weights_told(raw):
    """With beams that change places halfway: the mean over layers and heads, step after step; gates give 1 at most."""
    model, beams = build(raw), 2
    source, _, _ = batch()
    told = torch.randint(3, VOCABULARY, (len(LENGTHS) * beams, 4), generator=torch.Generator().manual_seed(4))
    memory = model.encode(source, need_weights="cross")
    assert getattr(memory, "maps", None) is None  # those of the encoder, which a search would only carry along
    state = model.widen(model.start(memory, 4, track=True), beams)
    rows = torch.tensor([1, 0, 3, 3, 4, 5])
    for at in range(4):
        _, state = model.step(memory, state, told[:, at]) if models.parse(raw).attends else (None, state)
        if at == 1:
            state, told = select_batch(state, rows), torch.cat([told[rows, :2], told[:, 2:]], 1)
    each = Source(*(expand_batch(part, beams) for part in (source.data, source.valid)))
    maps = model.decode(model.encode(each, need_weights=True), told, need_weights=True).maps
    assert maps is not None
    if models.parse(raw).attends:
        steps = torch.stack(maps["cross"]).mean((0, 2))
        total = steps.sum(-1, keepdim=True)
        close(model.received(state), torch.where(total > 1.001, steps / total, steps).sum(1))
    else:
        assert not maps["cross"]


@pytest.mark.parametrize("raw", PLAIN)
@torch.no_grad()
def test_a_source_without_tokens_is_no_nan(raw):
    model = build(raw)
    source, target_in, _ = batch()
    emptied = Source(source.data, source.valid & torch.tensor([[True], [False], [True]]))
    found = logits(model, emptied, target_in)
    assert found.isfinite().all()
    close(found[[0, 2]], logits(model, source, target_in)[[0, 2]])


@EACH
def test_gradients_equal_finite_differences(raw):
    """Of the loss, along one direction that moves every parameter."""
    if any(f"'{kind}'" in str(raw) for kind in CONSTANT):
        pytest.skip("some of it is a constant by definition")
    model, (source, target_in, valid) = build(raw), batch()
    target_out = torch.cat([target_in[:, 1:], torch.full((len(TARGETS), 1), EOS)], dim=1)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(logits(model, source, target_in)[valid], target_out[valid])

    generator = torch.Generator().manual_seed(5)
    ways = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in model.parameters()]
    loss().backward()
    slopes = ((each.grad, way) for each, way in zip(model.parameters(), ways, strict=True) if each.grad is not None)
    slope, losses, step = sum(float((grad * way).sum()) for grad, way in slopes), [], 1e-6
    with torch.no_grad():
        for moved in (step, -2 * step):
            for each, way in zip(model.parameters(), ways, strict=True):
                each += moved * way
            losses.append(float(loss()))
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("raw", PLAIN)
def test_it_says_how_many_logits_there_are(raw):
    """A search asks."""
    assert build(raw).target_vocab == VOCABULARY


@pytest.mark.parametrize("kind", [kind for kind in models.kinds() if not models.get(kind).sequential])
def test_what_looks_back_is_refused_where_steps_are_taken_at_once(kind):
    for site in LOOKING_BACK if "cross" in roles(kind) else ():
        with pytest.raises(ValidationError):
            models.parse(with_fertility({"kind": kind, **small(kind)[0], "attention": {"cross": site}}))


@EACH
def test_one_batch_is_learned_by_heart(raw):
    torch.manual_seed(0)
    width, rate = (16, 0.01) if raw["kind"] == "transformer" else (32, 0.02)  # what each learns fastest with
    wide = fitted(raw, width=width, ffn=32, embedding=16, dropout=0.0)
    if "attention" in raw:
        wide = fitted(wide, layers=1)  # other shapes are deeper
    model = models.parse(wide).build(Sizes(VOCABULARY, VOCABULARY, raw.get("tie") == "all", PAD, 7))
    for parameter in model.parameters():  # past the small weights of the beginning, where recurrent layers linger
        parameter.data += 0.2 * torch.randn_like(parameter)
    source, target_in, valid = batch()
    target_out = torch.cat([target_in[:, 1:], torch.full((len(TARGETS), 1), EOS)], dim=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    loss = torch.tensor(torch.inf)
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits(model, source, target_in)[valid], target_out[valid])
        loss.backward()
        optimizer.step()
        if loss.item() < 0.05:
            break
    assert loss.item() < 0.05


@EACH
@torch.no_grad()
def test_saved_weights_come_back_exactly(raw, tmp_path):
    model, other = build(raw, torch.float32), build(raw, torch.float32, seed=8)
    source, target_in, _ = batch()
    wanted = logits(model, source, target_in)
    assert not torch.equal(logits(other, source, target_in), wanted)
    save_weights(model, tmp_path / "model.safetensors")
    load_weights(other, tmp_path / "model.safetensors")
    assert torch.equal(logits(other, source, target_in), wanted)
    for (label, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), label


@pytest.mark.parametrize("raw", PLAIN)
def test_the_same_seed_gives_the_same_model(raw):
    first, second, third = build(raw), build(raw), build(raw, seed=4)
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first.parameters(), third.parameters(), strict=True))


@pytest.mark.parametrize("raw", BOUNDED)
@pytest.mark.parametrize("search", [{"kind": "greedy"}, {"kind": "beam", "size": 3}], ids=lambda raw: raw["kind"])
def test_a_search_stops_where_the_model_ends(raw, search):
    """max_ratio would let outputs be longer than the model can read; they are cut at what it can."""
    model = build({**raw, "max_length": 8})
    assert model.max_length == 8
    free = model.logits
    model.logits = lambda hidden: free(hidden).index_fill(-1, torch.tensor([EOS]), -torch.inf)  # nothing ever ends
    source = Source(*tokens((8, 1), 1))
    found = searches.parse({**search, "max_ratio": 5.0, "max_extra": 0}).build()(
        model, source, SpecialIds(BOS, EOS, PAD)
    )
    assert [len(row[0].tokens) for row in found] == [8, 5]


@pytest.mark.parametrize("raw", BOUNDED)
def test_what_is_longer_than_the_model_names_the_mend(raw):
    model = build({**raw, "max_length": 6})
    mend = "longer than model.max_length 6; raise it, or lower task.max_length"
    with pytest.raises(AttnbenchError, match=f"a sequence of 7 tokens is {mend}"):
        model.encode(Source(*tokens((7, 2), 1)))
    memory = model.encode(Source(*tokens((6, 2), 1)))
    with pytest.raises(AttnbenchError, match=f"a sequence of 8 tokens is {mend}"):
        model.decode(memory, tokens((8, 2), 1)[0])
    state = model.start(memory, 9)
    for _ in range(6):
        _, state = model.step(memory, state, torch.tensor([BOS, BOS]))
    with pytest.raises(AttnbenchError, match=f"a sequence of 7 tokens is {mend}"):
        model.step(memory, state, torch.tensor([BOS, BOS]))


@pytest.mark.parametrize("kind", models.kinds())
@torch.no_grad()
def test_every_layer_draws_keys_of_its_own(kind):
    places = {role: {"pattern": {"kind": "random", "n": 2}} for role in roles(kind)}
    model = build(fitted({"kind": kind, **small(kind)[0], "attention": places}, layers=2))
    source = Source(torch.full((1, 40), 5), torch.ones(1, 40, dtype=torch.bool))
    maps = model.decode(model.encode(source), torch.full((1, 40), 7), need_weights=True).maps
    assert maps is not None
    for role, layers in maps.items():
        for one, other in itertools.pairwise(layers):
            assert (one > 0).logical_and(other > 0).sum() < 0.5 * (one > 0).sum(), role


@pytest.mark.parametrize("kind", models.kinds())
@torch.no_grad()
def test_position_encodings_are_those_of_the_longest_source(kind):
    def hidden(longest_source: int, longest: int | None = None) -> Tensor:
        module = {"kind": "fixed_memory", "slots": 3, "positions": True, "longest": longest}
        raw = {"kind": kind, **small(kind)[0], "attention": {"cross": {"module": module}}}
        torch.manual_seed(0)
        model = models.parse(raw).build(Sizes(VOCABULARY, VOCABULARY, False, PAD, longest_source)).double().eval()
        source, target_in, _ = batch()
        return model.decode(model.encode(source), target_in).hidden

    assert torch.equal(hidden(17), hidden(5, 17))
    assert not torch.allclose(hidden(17), hidden(5))
