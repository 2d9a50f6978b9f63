"""The coverage penalty, by hand and against every output that there is."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from pydantic import ValidationError

from attnbench.attention.history import last_position
from attnbench.core.registry import MemberError
from attnbench.experiment.spec import CellSpec
from attnbench.models.base import Sizes, Source, models
from attnbench.search.base import SpecialIds, searches
from attnbench.search.beam import BeamSpec
from attnbench.search.coverage_penalty import CoveragePenaltySpec, coverage_penalties

PAD, BOS, EOS, VOCABULARY = 0, 1, 2, 6
LIMITS = SpecialIds(BOS, EOS, PAD)


def test_values_by_hand():
    received = torch.tensor([[[0.5, 3.0, 0.0, 0.7]], [[1.0, 1.0, 0.2, 0.2]]])
    words = torch.tensor([[True, True, True, False], [True, True, False, False]])
    found = coverage_penalties.parse({"kind": "wu", "beta": 0.3}).penalty(received, words)
    assert found.shape == (2, 1)
    assert found[0].item() == pytest.approx(0.3 * (math.log(0.5) + math.log(0.1)))
    assert found[1].item() == 0
    found = coverage_penalties.parse({"kind": "wu", "beta": 1.0, "floor": 0.6}).penalty(received, words)
    assert found[0].item() == pytest.approx(2 * math.log(0.6))


@pytest.mark.parametrize("kind", coverage_penalties.kinds())
def test_a_penalty_is_never_above_0_and_pays_no_heed_to_what_is_no_word(kind):
    """Or a beam would end too early."""
    received = 3 * torch.rand(4, 3, 6, generator=torch.Generator().manual_seed(0))
    received[0], received[1, 0] = 0, 5
    words = torch.arange(6) < torch.tensor([[6], [3], [1], [0]])
    penalty = coverage_penalties.parse(kind).penalty(received, words)
    assert penalty.shape == (4, 3)
    assert penalty.isfinite().all()
    assert (penalty <= 0).all()
    other = coverage_penalties.parse(kind).penalty(received.masked_fill(~words[:, None], 9.0), words)
    torch.testing.assert_close(other, penalty)


@pytest.mark.parametrize("fields", [{"beta": -0.1}, {"floor": 0.0}, {"floor": 1.5}, {"beta": float("inf")}])
def test_what_cannot_be_is_refused(fields):
    with pytest.raises(ValidationError):
        coverage_penalties.parse({"kind": "wu", **fields})


MODELS = {
    "lstm": {"kind": "lstm", "layers": 1, "width": 6, "attention": {"cross": {"transform": "sparsemax"}}},
    "transformer": {"kind": "transformer", "layers": 2, "width": 6, "heads": 2, "ffn": 8, "tie": "none"},
    "memory": {"kind": "gru", "layers": 1, "width": 6, "attention": {"cross": {"module": "fixed_memory"}}},
}


def drawn(raw, source_vocabulary=VOCABULARY, longest=4):
    """A model that is sure of something."""
    torch.manual_seed(4)
    sizes = Sizes(source_vocabulary, VOCABULARY, False, PAD, longest)
    model = models.parse({"dropout": 0.0, **raw}).build(sizes).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.7 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("raw", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("beta", [0.0, 0.5, 5.0])
@torch.no_grad()
def test_a_beam_that_holds_everything_finds_the_best_of_everything(raw, beta):
    """Every output of up to three words, its log-probability and its coverage told by decode()."""
    model = drawn(raw)
    data = torch.tensor([[3, 4, 5, EOS], [5, 3, EOS, PAD], [EOS, PAD, PAD, PAD]])
    search = {"size": 64, "n_best": 5, "penalty": "wu", "max_ratio": 0, "max_extra": 4}
    beam = searches.parse({"kind": "beam", **search, "coverage": {"kind": "wu", "beta": beta}}).build()
    found = beam(model, Source(data, data != PAD), LIMITS)
    outputs = [list(words) for length in range(4) for words in product(range(3, VOCABULARY), repeat=length)]
    for row, hypotheses in zip(data, found, strict=True):
        one = Source(row[None, row != PAD], torch.ones(1, int((row != PAD).sum())).bool())
        memory, scored = model.encode(one, need_weights=True), []
        for words in outputs:
            decoded = model.decode(memory, torch.tensor([[BOS, *words]]), need_weights=True)
            assert decoded.maps is not None
            log_probs = model.logits(decoded.hidden)[0].log_softmax(-1)
            log_prob = log_probs.gather(1, torch.tensor([*words, EOS])[:, None]).sum().item()
            received = torch.stack(decoded.maps["cross"]).mean((0, 2)).sum(1)[0]
            read = sum(math.log(min(max(each, 0.1), 1)) for each in received[~last_position(one.valid)[0]].tolist())
            scored.append((log_prob / ((5 + len(words) + 1) / 6) ** 0.6 + beta * read, words))
        scored.sort(reverse=True)
        assert [hypothesis.tokens for hypothesis in hypotheses] == [words for _, words in scored[:5]]
        for hypothesis, (score, _) in zip(hypotheses, scored, strict=False):
            assert hypothesis.score == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize("raw", MODELS.values(), ids=MODELS)
def test_it_asks_for_a_source_s_own_words_whichever_others_have_left(lab, raw):
    lengths = (2, 7, 3, 10)
    model, source = drawn(raw, 50, longest=12), lab.sources(*lengths)
    search = {"size": 4, "n_best": 4, "penalty": "wu", "max_ratio": 1.0, "max_extra": 2}
    beam = searches.parse({"kind": "beam", **search, "coverage": {"kind": "wu", "beta": 1.0}}).build()
    for row, (length, together) in enumerate(zip(lengths, beam(model, source, LIMITS), strict=True)):
        (alone,) = beam(model, lab.alone(source, row, length), LIMITS)
        assert [each.tokens for each in together] == [each.tokens for each in alone]
        assert [each.score for each in together] == pytest.approx([each.score for each in alone], abs=1e-9)


@torch.no_grad()
def test_gates_read_no_more_than_one_word_a_step():
    """Of each word nearly all, at every step: an output of no word would have read the whole source."""
    raw = {"kind": "gru", "layers": 1, "width": 6, "attention": {"cross": {"transform": "sigmoid"}}}
    model = models.parse(raw).build(Sizes(VOCABULARY, VOCABULARY, False, PAD, 4)).eval()
    data = torch.tensor([[3, 4, 5, 3, EOS]])
    memory = model.encode(Source(data, data != PAD), need_weights=True)
    state = model.start(memory, 4, track=True)
    for step in (1, 2):
        _, state = model.step(memory, state, torch.tensor([3]))
        assert model.received(state).sum().item() == pytest.approx(step)


def test_another_shape_is_told_before_a_search():
    class Each(CoveragePenaltySpec):
        kind: str = "each"

        def penalty(self, received, words):
            return received.log()

    with pytest.raises(MemberError, match=r"Each\.penalty gives a tensor of shape \(1, 2, 3\) where \(1, 2\) is asked"):
        BeamSpec(coverage=Each())


def test_a_model_that_attends_to_nothing_is_refused():
    raw = {
        "task": {"kind": "copying", "dataset": "copy"},
        "model": {"kind": "lstm", "readout": "state", "attention": {"cross": {"module": "none"}}},
        "search": {"kind": "beam", "coverage": "wu"},
    }
    with pytest.raises(ValidationError, match="attends to nothing"):
        CellSpec.model_validate(raw)
    model = models.parse(raw["model"] | {"layers": 1, "width": 6}).build(Sizes(VOCABULARY, VOCABULARY, False, PAD, 4))
    memory = model.eval().encode(Source(torch.tensor([[3, EOS]]), torch.ones(1, 2).bool()), need_weights=True)
    with pytest.raises(ValueError, match="start without track"):
        model.step(memory, model.start(memory, 4, track=True), torch.tensor([3]))
