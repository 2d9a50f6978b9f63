"""Documents: decoded in blocks, scored whole and by sentence, a wrong number of sentences handled and told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from attnbench.core.errors import AttnbenchError
from attnbench.data.corpus import Data
from attnbench.data.text import moses_detokenize
from attnbench.models.base import Source
from attnbench.models.transformer import TransformerSpec
from attnbench.search.base import Hypothesis, SpecialIds
from attnbench.search.greedy import GreedySpec
from attnbench.tasks import document
from attnbench.tasks.document import DocumentSpec

RAW: dict[str, Any] = {
    "dataset": {
        "kind": "documents",
        "languages": ["de", "en"],
        "train": [{"source": "a.de", "target": "a.en"}],
        "hold_every": 3,
    },
    "tokenizer": {"kind": "bpe", "vocab": 300},
    "block": 24,
    "lowercase": True,
}
WORDS = ("rot", "grün", "blau", "alt", "neu", "groß", "klein")


def sentence(document: int, number: int, side: str) -> str:
    words = [f"{side}{WORDS[(document + 2 * number + place) % 7]}" for place in range(4 + number % 3)]
    return " ".join(words).capitalize()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[DocumentSpec, Data]:
    folder = tmp_path_factory.mktemp("text")
    for side in ("de", "en"):
        lines = [f"<d>\n{''.join(sentence(d, n, side[0]) + chr(10) for n in range(5))}" for d in range(24)]
        (folder / f"a.{side}").write_text("".join(lines), encoding="utf-8")
    spec = DocumentSpec.model_validate(RAW)
    return spec, spec.open(spec.prepare(folder / "cache", folder, True))


class Oracle:
    """Knows each block's reference, and tells it as `alter` makes it."""

    spec = GreedySpec()

    def __init__(self, data: Data, split: str, alter=lambda text: text) -> None:
        pairs = data.split(split)
        self.known = dict(zip(pairs.source, pairs.target, strict=True))
        self.data, self.alter = data, alter

    def __call__(self, model: Any, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
        found = []
        for ids, valid in zip(source.data, source.valid, strict=True):
            text = self.known[self.data.source_vocabulary.decode(ids[valid].tolist())]
            tokens = self.data.target_vocabulary.encode(self.alter(text))
            found.append([Hypothesis(tokens, 0.0, 0.0, True)])
        return found


def build(spec: DocumentSpec, **raw: Any) -> Any:
    torch.manual_seed(0)
    small = {"layers": 1, "width": 8, "heads": 2, "ffn": 8, "dropout": 0.0, **raw}
    return TransformerSpec.model_validate(small).build(spec.model_sizes()).eval()


def evaluated(opened, alter=lambda text: text):
    spec, data = opened
    return spec.bind().evaluate(build(spec), data, "test", Oracle(data, "test", alter), 100)


def test_the_references_score_100(opened):
    _, data = opened
    test = data.split("test")
    assert any("<sep>" in line for line in test.target)
    assert len(set(test.documents)) < len(test.documents)
    found = evaluated(opened)
    for name in ("d_bleu", "d_bleu_13a", "d_bleu_13a_bound", "s_bleu", "s_bleu_13a", "chrf"):
        assert found.values[name] == pytest.approx(100)
    assert found.values["wrong_counts"] == found.values["unfinished"] == 0
    assert found.samples == {"documents": 8, "blocks": len(test), "sentences": 40}
    assert len(found.outputs["txt"]) == len(found.outputs["ref.txt"]) == len(found.outputs["src.txt"]) == 8
    assert found.outputs["txt"] == found.outputs["ref.txt"]
    assert found.outputs["ref.txt"][0] == " ".join(sentence(1, number, "e").lower() for number in range(5))
    assert found.outputs["detok.txt"][0] == found.outputs["txt"][0]
    assert found.outputs["blocks.txt"] == list(test.target)


def test_an_odd_quotation_mark_turns_none_of_another_sentence():
    odd, even = "he said &quot; no .", "and &quot; yes &quot; again ."
    data: Any = SimpleNamespace(detokenize=lambda lines: moses_detokenize("en", lines))
    (found, others) = document._detokenized(data, [[odd, even], [even]])
    assert found[1] == others[0] == 'and "yes" again.'
    assert moses_detokenize("en", [f"{odd} {even}"]) != [" ".join(found)]
    written = SimpleNamespace(
        target=[f"{odd} <sep> {even}"], references=[f"{found[0]} <sep> {found[1]}"], documents=["a"]
    )
    data.split, data.detokenizes = lambda split: written, True
    scored = DocumentSpec.model_validate(RAW).bind().score(data, "test", written.target)
    assert scored.outputs["detok.txt"] == [" ".join(found)]
    for name in ("d_bleu_13a", "d_bleu_13a_bound", "chrf"):
        assert scored.values[name] == pytest.approx(100)


def test_what_is_detokenised_by_sentences_says_so(opened):
    signatures = evaluated(opened).signatures
    assert {name for name, each in signatures.items() if each.endswith("|detok:sentence")} == {"d_bleu_13a", "chrf"}
    (_, score), data = ("chrf", document.Score(1.0, "of sacrebleu")), SimpleNamespace(detokenizes=False)
    assert document._by_sentence(data, score) == score  # type: ignore[arg-type] - all that is asked of it


def test_lost_separators_cost_sentences_and_not_documents(opened):
    _, data = opened
    found = evaluated(opened, lambda text: text.replace(" <sep> ", " "))
    assert found.values["d_bleu"] == pytest.approx(100)
    assert found.values["s_bleu"] < 90
    longer = sum("<sep>" in line for line in data.split("test").target)
    assert found.values["wrong_counts"] == pytest.approx(100 * longer / len(data.split("test")))


def test_separators_too_many_leave_the_first_sentences_in_their_places(opened):
    found = evaluated(opened, lambda text: text + " <sep> <sep>")
    assert found.values["s_bleu"] == found.values["d_bleu"] == pytest.approx(100)
    assert found.values["wrong_counts"] == 100


def test_outputs_without_a_word_are_scored(opened):
    found = evaluated(opened, lambda text: "")
    assert found.values["d_bleu"] == found.values["s_bleu"] == 0


def test_sentences_alone_are_scored_as_documents_too(opened, tmp_path_factory):
    """Without blocks a word like the separator parts nothing."""
    folder = tmp_path_factory.mktemp("alone")
    for side in ("de", "en"):
        text = "".join(
            f"<d>\n{'a' * document} x <sep> y {side}\nz{'a' * document} z z z z\n" for document in range(1, 7)
        )
        (folder / f"a.{side}").write_text(text, encoding="utf-8")
    spec = DocumentSpec.model_validate({**RAW, "block": None, "pretokenize": "none"})
    data = spec.open(spec.prepare(folder / "cache", folder, True))
    found = spec.bind().evaluate(build(spec), data, "test", Oracle(data, "test"), 100)
    assert found.samples == {"documents": 2, "blocks": 4, "sentences": 4}
    assert found.values["d_bleu"] == found.values["s_bleu"] == pytest.approx(100)


def test_validation_scores_blocks_without_separators(opened):
    spec, data = opened
    searcher = Oracle(data, "valid", lambda text: text.replace(" <sep> ", " "))
    found = spec.bind().evaluate(build(spec), data, "valid", searcher, 100, brief=True)
    assert found.values == {"bleu": pytest.approx(100)}


def test_a_model_learns_blocks_and_translates_new_ones(opened):
    spec, data = opened
    task, model = spec.bind(), build(spec, width=16)
    task.check(model, data)
    assert model.output.weight.shape[0] == 300
    before = task.validate(model, data, "valid", 200)["loss"]
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(12):
        for batch in data.eval_batches("train", tokens=200):
            loss = task.loss(model.train(), batch, 0.0).total / task.count(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert task.validate(model.eval(), data, "valid", 200)["loss"] < before - 1
    lines = task.translate(model, data, ["drot dgrün <sep> dblau", "dneu"], GreedySpec().build())
    assert len(lines) == 2
    told = task.inspect(model, data, "valid", 200)
    assert told.samples["attended"] == len(data.split("valid"))


def test_a_block_longer_than_the_model_reads_is_told(opened):
    spec, data = opened
    with pytest.raises(AttnbenchError, match=r"raise model\.max_length, or lower task\.block"):
        spec.bind().check(build(spec, max_length=12), data)


def test_a_corpus_without_documents_is_refused():
    with pytest.raises(ValidationError, match="does not say where a document ends; take `documents`"):
        DocumentSpec.model_validate({"dataset": "multi30k-de-en"})
