"""Decoders whose attention spends fertilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnbench.attention.history import last_position
from attnbench.models.base import Seq2SeqModel, Sizes, Source, models
from attnbench.search.base import SpecialIds, searches

PAD, BOS, EOS, WORDS = 0, 1, 2, 11
LIMITS = SpecialIds(BOS, EOS, PAD)
LENGTHS = (6, 1, 4)


def build(value: float = 0.8, seed: int = 0, kind: str = "lstm", **site: Any) -> Seq2SeqModel:
    torch.manual_seed(seed)
    raw = {
        "kind": kind, "layers": 1, "width": 7, "dropout": 0.0, "fertility": {"kind": "constant", "value": value},
        "attention": {"cross": {"transform": "csparsemax", **site}},
    }  # fmt: skip
    model = models.parse(raw).build(Sizes(WORDS, WORDS, False, PAD, max(LENGTHS)))
    for parameter in model.parameters():
        parameter.data += 0.4 * torch.randn_like(parameter)
    return model.double().eval()


def some_source(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Source:
    data = torch.randint(3, WORDS, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Source(data.masked_fill(~valid, PAD), valid)


def maps(model: Seq2SeqModel, source: Source, steps: int = 9) -> Tensor:
    """Weights [B, steps, S] of a decoder that is told some words."""
    told = torch.randint(3, WORDS, (len(source.valid), steps), generator=torch.Generator().manual_seed(5))
    told[:, 0] = BOS
    found = model.decode(model.encode(source, need_weights=True), told, need_weights=True).maps
    assert found is not None
    return found["cross"][0][:, 0]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16), kind=st.sampled_from(["lstm", "gru"]), value=st.floats(0, 3, width=32),
    transform=st.sampled_from(["csoftmax", "csparsemax"]), size=st.integers(1, 5), exhaustion=st.booleans(),
)  # fmt: skip
def test_no_beam_lets_a_word_spend_more_than_its_fertility(seed, kind, value, transform, size, exhaustion):
    site: dict[str, Any] = {"transform": transform, **({"bias": "exhaustion"} if exhaustion else {})}
    model, source, spent = build(value, seed, kind, **site), some_source(seed), []
    step = model.step

    def watched(memory: Any, state: Any, token: Tensor) -> Any:
        logits, state = step(memory, state, token)
        words = memory.cross.valid & ~last_position(memory.cross.valid)
        spent.append(state.history.spent.unflatten(0, (len(words), -1)).masked_select(words[:, None, None, :]))
        return logits, state

    model.step = watched  # type: ignore[method-assign]
    found = searches.parse({"kind": "beam", "size": size, "n_best": size}).build()(model, source, LIMITS)
    assert len(found) == len(LENGTHS)
    assert spent
    assert max(each.max().item() for each in spent if len(each)) <= value + 1e-9


@pytest.mark.parametrize("transform", ["csoftmax", "csparsemax"])
def test_beams_carry_what_they_spent(transform):
    """Each hypothesis has the log-probability that the decoder gives it alone, told its words."""
    model, source = build(transform=transform), some_source()
    found = searches.parse({"kind": "beam", "size": 4, "n_best": 4, "penalty": "none"}).build()(model, source, LIMITS)
    checked = 0
    for row, hypotheses in enumerate(found):
        one = Source(source.data[row : row + 1, : LENGTHS[row]], source.valid[row : row + 1, : LENGTHS[row]])
        for hypothesis in hypotheses:
            told = torch.tensor([[BOS, *hypothesis.tokens]])
            wanted = torch.tensor([*hypothesis.tokens, EOS] if hypothesis.finished else hypothesis.tokens)
            logits = model.logits(model.decode(model.encode(one), told).hidden)[0, : len(wanted)]
            log_prob = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
            assert log_prob.item() == pytest.approx(hypothesis.log_prob, abs=1e-8)
            checked += 1
    assert checked >= 6


def test_what_words_may_not_take_goes_to_the_sink_of_each_row():
    found = maps(build(value=0.01), some_source())
    sinks = torch.tensor(LENGTHS) - 1
    assert bool((found[torch.arange(3), :, sinks] > 0.9).all())
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 9, dtype=torch.float64))


def test_much_fertility_is_none():
    """Bounds that never bind: plain sparsemax."""
    source = some_source()
    bound = maps(build(value=50.0), source)
    torch.manual_seed(0)
    free = models.parse(
        {"kind": "lstm", "layers": 1, "width": 7, "dropout": 0.0, "attention": {"cross": {"transform": "sparsemax"}}}
    )
    model = free.build(Sizes(WORDS, WORDS, False, PAD, max(LENGTHS)))
    for parameter in model.parameters():
        parameter.data += 0.4 * torch.randn_like(parameter)
    torch.testing.assert_close(bound, maps(model.double().eval(), source))


def test_exhaustion_prefers_words_with_much_left():
    source = some_source()
    plain, pushed = (
        maps(build(value=0.8), source),
        maps(build(value=0.8, bias={"kind": "exhaustion", "c": 50.0}), source),
    )
    words = (source.valid & ~last_position(source.valid))[:, None, :]
    early = slice(0, 2)
    assert pushed.masked_fill(~words, 0.0)[:, early].sum() > plain.masked_fill(~words, 0.0)[:, early].sum()
    assert pushed.masked_fill(~words, 0.0)[0, early].sum().item() == pytest.approx(2.0)


def test_the_gradient_goes_through_what_was_spent_before():
    """Equal to finite differences of the whole decoder, whose later steps depend on the earlier ones' weights."""
    model, source = build(value=0.6, transform="csoftmax"), some_source()
    parameter = model.encoder.table.weight

    def loss(shift: Tensor) -> Tensor:
        kept = parameter.data.clone()
        try:
            return torch.func.functional_call(
                model, {"encoder.table.weight": parameter + shift}, (), {"source": source}
            )
        finally:
            parameter.data.copy_(kept)

    model.forward = lambda source: (maps(model, source, 5) * torch.arange(5.0)[:, None]).square().sum()  # type: ignore[method-assign]
    shift = torch.zeros_like(parameter, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (shift,), atol=1e-6)


@pytest.mark.parametrize(("raw", "message"), [
    ({"attention": {"cross": {"transform": "csparsemax"}}}, "the transform 'csparsemax' .*fertility: "),
    ({"attention": {"cross": {"bias": "exhaustion"}}}, "the bias 'exhaustion' .*fertility: "),
    ({"fertility": {"kind": "constant", "value": 2}}, "nothing spends the fertility 'constant'"),
    ({"fertility": {"kind": "constant"}}, "value"),
    ({"attention": {"cross": {"coverage": "simple", "score": "dot"}}}, "no place for a coverage"),
    ({"attention": {"cross": {"coverage": "simple", "module": "multihead"}}}, "'multihead' has no coverage"),
    ({"attention": {"cross": {"coverage": "simple", "module": "fixed_memory"}}}, "'fixed_memory' has no coverage"),
    ({"attention": {"cross": {"bias": "exhaustion", "module": "none"}}}, "'none' has no bias"),
])  # fmt: skip
def test_what_cannot_be_is_refused_when_the_spec_is_read(raw, message):
    with pytest.raises(ValueError, match=message):
        models.parse({"kind": "lstm", **raw})


@pytest.mark.parametrize("kind", ["transformer", "convs2s"])
@pytest.mark.parametrize(
    "site",
    [
        {"transform": "csoftmax"},
        {"bias": "exhaustion"},
        {"coverage": "neural", "score": "additive", "module": "single_head"},
    ],
)
def test_models_that_see_all_positions_at_once_refuse_it(kind, site):
    with pytest.raises(ValueError, match=r"what was attended before|cannot stand"):
        models.parse({"kind": kind, "attention": {"cross": site}})
