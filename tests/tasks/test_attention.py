"""Attention between words: pieces merged, padding and EOS left out, lines in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from attnbench.core.errors import SpecError
from attnbench.data.base import BOS, EOS
from attnbench.data.corpus import Data
from attnbench.models.base import Seq2SeqModel, Source, models
from attnbench.tasks import attention
from attnbench.tasks.attention import word_attention
from attnbench.tasks.translation import TranslationSpec


@pytest.fixture(scope="module")
def spec() -> TranslationSpec:
    dataset = {"kind": "demo", "pairs": 200, "held_out": 12}
    return TranslationSpec.model_validate(
        {"dataset": dataset, "tokenizer": {"kind": "bpe", "vocab": 90, "joint": True}}
    )


@pytest.fixture(scope="module")
def data(spec, tmp_path_factory) -> Data:
    return Data.open(spec.prepare(tmp_path_factory.mktemp("cache"), None, offline=True))


def build(spec: TranslationSpec, raw: dict[str, Any]) -> Seq2SeqModel:
    torch.manual_seed(3)
    return models.parse(raw).build(spec.model_sizes()).eval()


MODELS = {
    "transformer": {"kind": "transformer", "layers": 2, "width": 8, "heads": 2, "ffn": 8},
    "csparsemax": {
        "kind": "lstm", "layers": 1, "width": 8, "fertility": {"kind": "constant", "value": 2},
        "attention": {"cross": {"transform": "csparsemax"}},
    },
    "memory": {"kind": "gru", "layers": 1, "width": 8, "attention": {"cross": {"module": "fixed_memory"}}},
}  # fmt: skip


@pytest.mark.parametrize("raw", MODELS.values(), ids=MODELS)
def test_each_pair_gets_what_it_gets_alone_merged_by_hand(spec, data, raw, monkeypatch):
    monkeypatch.setattr(attention, "SENTENCES", 5)
    model = build(spec, raw)
    sources, targets = list(data.split("test").source), list(data.split("test").target)
    found = word_attention(model, data, sources, targets)
    vocabulary, merged = data.source_vocabulary, 0
    for source, target, table in zip(sources, targets, found, strict=True):
        given, told = vocabulary.encode(source), vocabulary.encode(target)
        whole = Source(torch.tensor([[*given, EOS]]), torch.ones(1, len(given) + 1).bool())
        memory = model.encode(whole, need_weights=True)
        maps = model.decode(memory, torch.tensor([[BOS, *told]]), need_weights=True).maps
        assert maps is not None
        weights = torch.stack(maps["cross"]).mean((0, 2))[0].detach()
        total = weights.sum(-1, keepdim=True)  # fixed-size memory may tell a little more than 1
        weights = torch.where(total > 1.001, weights / total, weights)
        assert table.shape == (len(target.split()), len(source.split()))
        top = 0
        for row, word in enumerate(target.split()):
            height, left = len(vocabulary.encode(word)), 0
            for column, other in enumerate(source.split()):
                width = len(vocabulary.encode(other))
                wanted = weights[top : top + height, left : left + width].sum() / height
                assert table[row, column] == pytest.approx(wanted.item(), abs=1e-5)
                left += width
                merged += width > 1
            top += height
    assert merged


def test_empty_lines_and_unknown_words_have_a_place(spec, data):
    found = word_attention(build(spec, MODELS["transformer"]), data, ["", "Ж \u3000 x"], ["a b", ""])
    assert [table.shape for table in found] == [(2, 0), (0, 3)]
    assert all(np.isfinite(table).all() for table in found)


def test_lines_are_lower_case_where_the_model_reads_no_other(spec, tmp_path):
    lower = spec.replace(lowercase=True)
    data = Data.open(lower.prepare(tmp_path, None, offline=True))
    sources, targets = list(data.split("test").source), list(data.split("test").target)
    model = build(lower, MODELS["transformer"])
    plain, loud = (
        word_attention(model, data, *([line.upper() if up else line for line in side] for side in (sources, targets)))
        for up in (False, True)
    )
    assert all(np.array_equal(one, other) for one, other in zip(plain, loud, strict=True))


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_line_that_is_too_long_is_named(spec, data, side):
    model = build(spec, {**MODELS["transformer"], "max_length": 12})
    sources, targets = ["a"] * 2, ["a"] * 2
    {"source": sources, "target": targets}[side][1] = "a " * 40
    with pytest.raises(SpecError, match=rf"line 2 of the {side} has \d+ tokens, and the model reads 12"):
        word_attention(model, data, sources, targets)


def test_a_model_without_attention_is_told(spec, data):
    model = build(
        spec, {"kind": "lstm", "layers": 1, "width": 8, "readout": "state", "attention": {"cross": {"module": "none"}}}
    )
    with pytest.raises(SpecError, match="attends to nothing"):
        word_attention(model, data, ["a"], ["b"])


def test_gates_are_shares_where_they_sum_to_more_than_one(spec, data):
    """Else the soft error rate would reward a model that attends to everything at once."""
    model = build(spec, {"kind": "gru", "layers": 1, "width": 8, "attention": {"cross": {"transform": "sigmoid"}}})
    sources, targets = list(data.split("test").source), list(data.split("test").target)
    totals = np.concatenate([table.sum(-1) for table in word_attention(model, data, sources, targets)])
    assert totals.max() <= 1 + 1e-6
    assert totals.min() > 0.5  # the rest is EOS's
