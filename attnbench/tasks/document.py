"""Translation of documents in blocks of sentences: BLEU of whole documents (d-BLEU) and of sentences (s-BLEU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from attnbench.core.run_files import REFERENCES
from attnbench.data.blocks import split_sentences
from attnbench.data.corpus import Data
from attnbench.metrics.bleu import BleuKind, Score, corpus_bleu, corpus_chrf
from attnbench.metrics.documents import joined, matched
from attnbench.tasks.base import Metrics, tasks
from attnbench.tasks.pairs import PairSpec, PairTask


@tasks.register
class DocumentSpec(PairSpec):
    """Translation of documents: a block of up to `block` tokens is one input; null takes sentences alone."""

    kind: Literal["document"] = "document"
    bleu: Literal["tok_lc", "tok"] = "tok_lc"
    """The scores called `d_bleu` and `s_bleu`, on tokenised text: lower-cased or as it is."""
    primary: ClassVar[str] = "test/d_bleu"

    @model_validator(mode="after")
    def _has_documents(self) -> Self:
        if not self.dataset.documents:
            raise ValueError(
                f"the corpus '{self.dataset.kind}' does not say where a document ends; take `documents`, `ted-doc` or "
                "`nc-doc`, or `kind: translation`"
            )
        return self

    def for_training(self, *, scored: bool) -> Self:
        return self if scored else self.replace(bleu="tok_lc")

    def bind(self) -> Documents:
        return Documents(self)


class Documents(PairTask):
    """See DocumentSpec. Outputs are documents, one a line; `blocks.txt` is what was decoded."""

    def __init__(self, spec: DocumentSpec) -> None:
        super().__init__()
        self.spec = spec

    def bleu(self, lines: Sequence[str], references: Sequence[str]) -> Score:
        """Of blocks: the separators are no words."""
        outputs, wanted = ([_flat(self._sentences(line)) for line in side] for side in (lines, references))
        return corpus_bleu(outputs, wanted, self.spec.bleu)

    def score(self, data: Data, split: str, lines: list[str]) -> Metrics:
        documents, wanted = self._documents(data, split), [self._sentences(line) for line in data.split(split).target]
        decoded = [self._sentences(line) for line in lines]
        wrong = sum(len(found) != len(those) for found, those in zip(decoded, wanted, strict=True))
        sentences = [matched(found, len(those)) for found, those in zip(decoded, wanted, strict=True)]
        raw = [self._sentences(line) for line in data.split(split).references]
        cased: BleuKind = "13a_lc" if self.spec.lowercase else "13a"
        whole = _whole(decoded, documents)
        plain = _whole(_detokenized(data, decoded), documents)
        plain_sentences = data.detokenize(_all(sentences))
        references = _whole(raw, documents)
        scores = {
            "d_bleu": corpus_bleu(whole, _whole(wanted, documents), self.spec.bleu),
            "d_bleu_13a": _by_sentence(data, corpus_bleu(plain, references, cased)),
            "s_bleu": corpus_bleu(_all(sentences), _all(wanted), self.spec.bleu),
            "s_bleu_13a": corpus_bleu(plain_sentences, _all(raw), cased),
            "chrf": _by_sentence(data, corpus_chrf(plain, references, lowercase=self.spec.lowercase)),
        }
        values = {name: score.value for name, score in scores.items()}
        perfect = _whole(_detokenized(data, wanted), documents)
        values["d_bleu_13a_bound"] = corpus_bleu(perfect, references, cased).value
        values["wrong_counts"] = 100 * wrong / len(lines)
        samples = {"documents": len(whole), "blocks": len(lines), "sentences": len(_all(wanted))}
        return Metrics(
            values,
            {name: score.signature for name, score in scores.items()},
            samples,
            {"txt": whole, "detok.txt": plain, "blocks.txt": lines},
        )

    def texts(self, data: Data, split: str) -> dict[str, list[str]]:
        documents, pairs = self._documents(data, split), data.split(split)
        sides = {REFERENCES: pairs.target, "src.txt": pairs.source}
        return {name: _whole([self._sentences(line) for line in side], documents) for name, side in sides.items()}

    def written(self, data: Data, lines: list[str]) -> list[str]:
        return data.detokenize(lines)

    def _sentences(self, line: str) -> list[str]:
        """Of a block; without blocks a line is a sentence, whatever words it has."""
        return [line] if self.spec.block is None else split_sentences(line)

    def _documents(self, data: Data, split: str) -> list[str]:
        documents = data.split(split).documents
        assert documents is not None  # as of every corpus that says where they end
        return list(documents)


def _detokenized(data: Data, blocks: Sequence[Sequence[str]]) -> list[list[str]]:
    """Sentence by sentence: in a line that holds more, an odd quotation mark would turn all behind it."""
    plain = iter(data.detokenize(_all(blocks)))
    return [[next(plain) for _ in block] for block in blocks]


def _by_sentence(data: Data, score: Score) -> Score:
    """Of text that was detokenised so, if it was."""
    return score._replace(signature=f"{score.signature}|detok:sentence") if data.detokenizes else score


def _flat(sentences: Sequence[str]) -> str:
    return " ".join(filter(None, sentences))


def _whole(blocks: Sequence[Sequence[str]], documents: Sequence[str]) -> list[str]:
    return joined([_flat(block) for block in blocks], documents)


def _all(blocks: Sequence[Sequence[str]]) -> list[str]:
    return [sentence for block in blocks for sentence in block]
