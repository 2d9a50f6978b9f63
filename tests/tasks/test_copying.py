"""Copying: sources are targets, empty ones among them; scores by hand and by an oracle that copies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from attnbench.data.base import EOS
from attnbench.data.corpus import Data
from attnbench.models.base import Seq2SeqModel, Source
from attnbench.models.transformer import TransformerSpec
from attnbench.search.base import Hypothesis, SpecialIds
from attnbench.search.beam import BeamSpec
from attnbench.tasks.copying import Copying, CopyingSpec, exact

COPY: dict[str, Any] = {"kind": "copy", "pairs": 200, "held_out": 30, "longest": 6}


def parse(**raw: Any) -> CopyingSpec:
    return CopyingSpec.model_validate({"dataset": COPY, **raw})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    spec = parse()
    cache = tmp_path_factory.mktemp("cache")
    path = spec.prepare(cache, None, True)
    assert path == spec.data_path(cache)
    return spec.open(path)


@pytest.fixture
def task() -> Copying:
    return parse().bind()


@pytest.fixture
def model() -> Seq2SeqModel:
    torch.manual_seed(0)
    small = {"layers": 1, "width": 8, "heads": 2, "ffn": 8, "dropout": 0.0}
    return TransformerSpec.model_validate(small).build(parse().model_sizes()).eval()


def test_targets_are_counted_in_tokens_and_in_sentences(data: Data, task: Copying):
    lines = data.split("valid").target
    batches = list(data.eval_batches("valid", tokens=20))
    assert sum(map(task.sentences, batches)) == len(lines) == 30
    assert sum(map(task.count, batches)) == sum(len(line.split()) + 1 for line in lines)  # EOS counted


class Copier:
    """A search that gives every source back; wrong: how many sources of a batch it spoils."""

    spec = BeamSpec()

    def __init__(self, wrong: int = 0) -> None:
        self.wrong = wrong
        self.sources = 0

    def __call__(self, model: Seq2SeqModel, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
        found = []
        for number, (ids, valid) in enumerate(zip(source.data, source.valid, strict=True)):
            tokens = ids[valid].tolist()
            assert tokens.pop() == EOS
            found.append([Hypothesis([*tokens, 5] if number < self.wrong else tokens, 0.0, 0.0, True)])
        self.sources += len(found)
        return found


def test_the_model_is_sized_by_the_symbols():
    assert parse().model_sizes() == (24, 24, True, 0, 7)


def test_a_perfect_copier(data: Data, task: Copying, model: Seq2SeqModel):
    metrics = task.evaluate(model, data, "valid", Copier(), 50)
    assert {name: metrics.values[name] for name in ("bleu", "exact", "bleu_bound", "exact_bound")} == {
        "bleu": pytest.approx(100), "exact": 100, "bleu_bound": pytest.approx(100), "exact_bound": 100,
    }  # fmt: skip
    assert metrics.outputs["txt"] == metrics.outputs["ref.txt"] == list(data.split("valid").source)
    assert "" in metrics.outputs["txt"]
    assert "case:mixed|eff:no|tok:none|smooth:none" in metrics.signatures["bleu"]


def test_exact_counts_lines_and_eos_is_in_no_score(data: Data, task: Copying, model: Seq2SeqModel):
    metrics = task.evaluate(model, data, "valid", Copier(wrong=3), 10_000)
    assert metrics.values["exact"] == pytest.approx(100 * 27 / 30)
    assert 0 < metrics.values["bleu"] < 100
    assert not any("</s>" in line for line in metrics.outputs["txt"])
    assert exact(["a", "", "b"], ["a", "", "c"]) == pytest.approx(200 / 3)
    assert exact([], []) == 0
    with pytest.raises(ValueError, match="zip"):
        exact(["a"], [])


def test_case_is_part_of_a_word(task: Copying):
    assert task.bleu(["A b c d e"], ["a b c d e"]).value < 100
    assert exact(["A"], ["a"]) == 0


def test_words_without_a_row_bound_the_scores(tmp_path: Path):
    spec = parse(tokenizer={"kind": "word", "source_vocab": 14, "target_vocab": 14, "joint": True})
    data, task = spec.open(spec.prepare(tmp_path, None, True)), spec.bind()
    lines = list(data.split("test").target)
    filled = set(data.target_vocabulary.decode(range(4, 14)).split())
    known = [line for line in lines if set(line.split()) <= filled]
    values = task.score(data, "test", lines).values
    assert values["exact_bound"] == pytest.approx(100 * len(known) / len(lines))
    assert 0 < len(known) < len(lines)
    assert values["bleu_bound"] < 100


def test_references_too_short_for_a_bleu_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    spec = parse(dataset={**COPY, "longest": 3})
    data, task = spec.open(spec.prepare(tmp_path, None, True)), spec.bind()
    values = task.score(data, "test", list(data.split("test").target)).values
    assert (values["bleu"], values["exact"]) == (0, 100)
    assert "test: no reference has four known words in a row" in caplog.text


def test_a_model_decodes_scores_and_shows_its_attention(data: Data, task: Copying, model: Seq2SeqModel):
    """The real searches and models, on a split with empty sequences."""
    task.check(model, data)
    metrics = task.evaluate(model, data, "valid", BeamSpec(size=3).build(), 60)
    assert len(metrics.outputs["txt"]) == 30
    assert math.isfinite(metrics.values["bleu"])
    values = task.validate(model, data, "valid", 60)
    assert values["ppl"] == pytest.approx(math.exp(values["loss"]))
    inspected = task.inspect(model, data, "valid", 60)
    assert inspected.samples == {"attended": 30}
    assert inspected.values["attended/cross"] >= 1


def test_translate_gives_tokens_as_they_are(data: Data, task: Copying, model: Seq2SeqModel):
    lines = ["3 1 2", "", "19", "unheard of"]
    assert task.translate(model, data, lines, Copier()) == ["3 1 2", "", "19", "<unk> <unk>"]


@pytest.mark.parametrize(("size", "wanted"), [(7, 7), (30, 30), (1000, 30)])
def test_a_sample_of_the_training_sentences(data: Data, task: Copying, model: Seq2SeqModel, size: int, wanted: int):
    copier = Copier()
    assert task.sample_bleu(model, data, copier, 40, size) == pytest.approx(100)
    assert copier.sources == wanted
    assert task.sample_bleu(model, data, Copier(wrong=100), 40, size) < 100


def test_a_translation_is_not_copied():
    """Its target would be learned in place of the source, and scored as a copy."""
    with pytest.raises(ValidationError, match="'multi30k-de-en' is a translation from de to en"):
        CopyingSpec.model_validate({"dataset": "multi30k-de-en"})
