"""Where fertilities come from: guided, actual and predicted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnbench.core.errors import AttnbenchError
from attnbench.models.base import Sizes, Source, models
from attnbench.models.fertility.base import Fertility, fertilities

PAD, EOS, ROWS = 0, 2, 9
SIZES = Sizes(ROWS, ROWS, False, PAD)
SMALL = {"kind": "predicted", "layers": 1, "embedding": 8, "width": 8, "most": 4, "epochs": 12, "rate": 0.02}


def build(raw: Any, seed: int = 0) -> Fertility:
    torch.manual_seed(seed)
    return fertilities.parse(raw).build(SIZES)


def lesson(*rows: list[tuple[int, int]]) -> Source:
    """Rows of (word, fertility) with EOS, the sink, behind, padded."""
    width = max(map(len, rows)) + 1
    padded = [[*row, (EOS, 1), *[(PAD, 0)] * (width - len(row) - 1)] for row in rows]
    data, fertility = torch.tensor(padded).unbind(-1)
    return Source(data, data != PAD, fertility.float())


def test_guided_is_the_largest_seen_of_each_word():
    guided = build("guided")
    guided.learn([lesson([(3, 1), (4, 2), (3, 3)], [(5, 1)]), lesson([(4, 1), (3, 2)])], [], seed=1)
    found = guided(Source(torch.tensor([[3, 4, 5, 6], [6, PAD, PAD, PAD]]), torch.ones(2, 4).bool()))
    assert found[0].tolist() == [3, 2, 1, 1]
    assert found[1, 0] == 1
    assert guided.table[PAD] == 1  # padding taught nothing


def test_guided_comes_back_with_the_weights():
    guided, other = build("guided"), build("guided")
    guided.learn([lesson([(3, 2)])], [], seed=1)
    other.load_state_dict(guided.state_dict())
    assert torch.equal(other.table, guided.table)


def test_actual_adds_its_slack_and_asks_for_an_oracle():
    source = lesson([(3, 1), (4, 2)])
    assert build("actual")(source)[:, :2].tolist() == [[2, 3]]
    assert build({"kind": "actual", "slack": 0.5})(source)[:, :2].tolist() == [[1.5, 2.5]]
    with pytest.raises(AttnbenchError, match="oracle"):
        build("actual")(Source(source.data, source.valid))


def drawn(count: int, seed: int) -> list[Source]:
    """Words that have the fertility 3 before the word 8, else 1; but for the word 3, which has 2."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        rows = []
        for _ in range(8):
            words = torch.randint(
                3, ROWS, (int(torch.randint(1, 7, (), generator=generator)),), generator=generator
            ).tolist()
            after = [*words[1:], PAD]
            rows.append(
                [
                    (word, 2 if word == 3 else 3 if follows == 8 else 1)
                    for word, follows in zip(words, after, strict=True)
                ]
            )
        found.append(lesson(*rows))
    return found


@pytest.fixture(scope="module")
def taught() -> Fertility:
    tagger = build(SMALL)
    tagger.learn(drawn(60, 1), drawn(4, 2), seed=5)
    return tagger


def test_predicted_learns_what_words_and_neighbours_decide(taught):
    report = taught.report()
    assert report["f1"] > 0.9
    assert report["accuracy"] > 0.9
    source = lesson([(4, 1), (8, 1), (3, 2), (5, 1)])
    assert (taught._tag(source).argmax(-1) + 1)[0, :4].tolist() == [3, 1, 2, 1]
    assert taught(source)[0, 0] > taught(source)[0, 2] > taught(source)[0, 1]


def test_a_regression_learns_them_as_numbers():
    tagger = build({**SMALL, "head": "regression", "epochs": 25})
    tagger.learn(drawn(60, 1), drawn(4, 2), seed=5)
    assert tagger.report()["f1"] > 0.9
    source = lesson([(4, 1), (8, 1), (3, 2), (5, 1)])
    found = tagger(source)[0, :4] - 1
    torch.testing.assert_close(found, torch.tensor([3.0, 1.0, 2.0, 1.0]), atol=0.3, rtol=0)
    torch.testing.assert_close(found, 4 * tagger._tag(source)[0, :4, 0].sigmoid())


def test_a_regression_is_judged_by_the_nearest_fertility(monkeypatch):
    tagger = build({**SMALL, "head": "regression"})
    true, said = [1, 1, 2, 4, 3], [0.1, 1.6, 2.4, 3.9, 1.4]  # the classes 1, 2, 2, 4, 1
    chances = torch.tensor([*said, 2.0], dtype=torch.double) / 4
    monkeypatch.setattr(tagger, "_tag", lambda source: chances.logit()[None, :, None])
    f1, accuracy, squares = tagger._judge([lesson([(4, fertility) for fertility in true])], torch.ones(4))
    assert f1 == pytest.approx(2 * 2 / (3 + 3))
    assert accuracy == pytest.approx(3 / 5)
    assert squares == pytest.approx(sum((one - other) ** 2 for one, other in zip(true, said, strict=True)), rel=1e-5)


def test_f1_is_of_positions_that_are_right_and_not_1(monkeypatch):
    """Of fertilities above 1, 4 are true and 4 are said, and 2 are those; 4 of 7 words are right in all."""
    true, said = [1, 1, 1, 2, 2, 3, 4], [1, 1, 2, 2, 1, 3, 2]
    tagger = build(SMALL)
    logits = torch.nn.functional.one_hot(torch.tensor([[*said, 2]]) - 1, SMALL["most"]).double()  # wrong of the sink
    monkeypatch.setattr(tagger, "_tag", lambda source: logits)
    weights = torch.tensor([0.5, 1, 1, 1], dtype=torch.double)
    f1, accuracy, nats = tagger._judge([lesson([(4, fertility) for fertility in true])], weights)
    assert f1 == pytest.approx(2 * 2 / (4 + 4))
    assert accuracy == pytest.approx(4 / 7)
    right, wrong = (math.log(math.e + 3) - logit for logit in (1, 0))
    of_each = [
        (0.5 if one == 1 else 1) * (right if one == other else wrong) for one, other in zip(true, said, strict=True)
    ]
    assert nats == pytest.approx(sum(of_each))


def test_lessons_come_in_another_order_each_epoch_and_with_dropout(monkeypatch):
    tagger = build({**SMALL, "layers": 2, "dropout": 0.4, "epochs": 3})
    lessons = [lesson([(word, 2)]) for word in (3, 4, 5, 6, 7, 8)]
    orders, widths = [], []

    def tag(source, tag=tagger._tag):
        assert tagger.training is torch.is_grad_enabled()
        if tagger.training:
            orders.append(int(source.data[0, 0]))
        return tag(source)

    def note(module, given):
        assert module.training is tagger.training
        widths.append(given[0].shape[-1])

    monkeypatch.setattr(tagger, "_tag", tag)
    tagger.dropout.register_forward_pre_hook(note)
    tagger.learn(lessons, lessons[:1], seed=1)
    epochs = [orders[start : start + 6] for start in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [[3, 4, 5, 6, 7, 8]] * 3
    assert len(set(map(tuple, epochs))) == 3
    assert set(zip(widths[::2], widths[1::2], strict=True)) == {(SMALL["embedding"], 2 * SMALL["width"])}
    assert tagger.tagger.dropout == tagger.dropout.p == 0.4


def test_the_weights_of_the_best_epoch_stay():
    """On lessons that cannot be learned F1 comes and goes."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)

        def some(low: int, high: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(low, high, (), generator=generator))

        noise = [lesson(*([(some(3, ROWS), some(1, 4))] for _ in range(6))) for _ in range(6)]
        tagger = build({**SMALL, "epochs": 8, "rate": 0.02})
        tagger.learn(noise[:3], noise[3:], seed=seed)
        weights = torch.ones(tagger.spec.most)
        weights[0] = tagger.spec.weight_of_one
        assert tagger._judge(noise[3:], weights)[0] == pytest.approx(tagger.f1.item())


def test_the_expectation_is_that_of_the_probabilities(taught):
    source = lesson([(4, 1), (8, 1)])
    chances = taught._tag(source).softmax(-1)
    torch.testing.assert_close(taught(source), (chances * torch.tensor([1.0, 2, 3, 4])).sum(-1) + 1)


def test_padding_and_batches_change_nothing(taught):
    first, second = [(4, 1), (8, 1), (3, 2)], [(5, 1)]
    together = taught(lesson(first, second))
    torch.testing.assert_close(together[0], taught(lesson(first))[0])
    torch.testing.assert_close(together[1, :2], taught(lesson(second))[0])


def test_what_was_learned_stays_as_it_is(taught):
    """No gradient, and no dropout while the model around it trains."""
    assert not any(parameter.requires_grad for parameter in taught.parameters())
    source = lesson([(4, 1), (8, 1)])
    taught.train()
    assert torch.equal(taught(source), taught(source))


def test_learning_is_a_function_of_the_seed_and_leaves_the_generator_alone():
    results = []
    for own in (3, 4):
        tagger = build({**SMALL, "epochs": 1})
        torch.manual_seed(own)
        before = torch.get_rng_state()
        tagger.learn(drawn(3, 1), drawn(1, 2), seed=5)
        assert torch.equal(torch.get_rng_state(), before)
        results.append(tagger.output.weight)
    assert torch.equal(*results)


def test_the_sink_is_no_lesson():
    tagger = build(SMALL)
    source = lesson([(4, 1), (8, 1)], [(3, 2)])
    words = tagger._lesson(source)[2]
    assert words.sum(1).tolist() == [2, 1]
    assert not words[source.data == EOS].any()


def test_ones_weigh_what_is_said():
    """Where they weigh nothing, nothing is learned of them, and every word may have more."""
    found = []
    for weight in (1.0, 1e-3):
        tagger = build({**SMALL, "epochs": 3, "weight_of_one": weight})
        tagger.learn(drawn(20, 1), drawn(4, 2), seed=5)
        found.append(float(tagger(lesson([(5, 1), (6, 1), (7, 1)]))[0, :3].mean()))
    assert found[1] > found[0] + 0.3


def test_larger_fertilities_count_as_the_most():
    tagger = build({**SMALL, "epochs": 1})
    tagger.learn([lesson([(4, 30)])], [lesson([(4, 30)])], seed=1)
    assert tagger(lesson([(4, 1)]))[0, 0] <= SMALL["most"] + 1


def test_a_source_without_tokens_is_no_nan(taught):
    source = Source(torch.full((2, 3), PAD), torch.zeros(2, 3).bool())
    assert taught(source).isfinite().all()


@pytest.mark.parametrize("kind", fertilities.kinds())
def test_every_kind_stands_in_a_decoder_and_comes_back_with_its_weights(kind):
    fertility = {"constant": {"kind": kind, "value": 2}, "predicted": SMALL}.get(kind, {"kind": kind})
    raw = {
        "kind": "gru",
        "layers": 1,
        "width": 6,
        "fertility": fertility,
        "attention": {"cross": {"transform": "csoftmax"}},
    }
    source, target = lesson([(3, 1), (4, 2), (5, 1)], [(6, 1)]), torch.tensor([[1, 3], [1, 4]])
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = models.parse(raw).build(SIZES).eval()
        if found:
            model.load_state_dict(found[0][0])
        found.append((model.state_dict(), model.decode(model.encode(source), target).hidden))
    assert torch.equal(found[0][1], found[1][1])
    assert fertilities.get(kind).paper


def test_predicted_goes_on_learning_where_no_fertility_above_1_is_dared(caplog: pytest.LogCaptureFixture):
    """F1 is 0 in every epoch where all fertilities are 1: the loss tells the epochs apart."""
    ones = [lesson([(3, 1), (4, 1), (5, 1)], [(6, 1), (7, 1)])]
    found = []
    for epochs in (1, 40):
        tagger = build({**SMALL, "epochs": epochs, "slack": 0.0})
        tagger.learn(ones, ones, seed=5)
        found.append(tagger(ones[0])[0, :3].mean().item())
    assert found[0] > 1.5 > 1.2 > found[1]
    assert "finds no word of the validation text with a fertility above 1" in caplog.text
    unjudged = build({**SMALL, "epochs": 40, "slack": 0.0})
    unjudged.learn(ones, [], seed=5)
    assert unjudged(ones[0])[0, :3].mean().item() < 1.2
