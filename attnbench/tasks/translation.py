"""Translation of sentences: smoothed cross-entropy, BLEU in the papers' convention and in sacrebleu's, chrF."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import field_validator

from attnbench.core.errors import AttnbenchError
from attnbench.data.base import BOS, EOS, PAD, Batch
from attnbench.data.corpus import Data
from attnbench.data.datasets.base import SPLITS
from attnbench.data.prepare import prepare, prepared_path
from attnbench.data.recipe import Recipe
from attnbench.metrics.bleu import corpus_bleu, corpus_chrf
from attnbench.metrics.likelihood import perplexity
from attnbench.metrics.sparsity import SiteSparsity
from attnbench.models.base import Seq2SeqModel, Sizes, Source
from attnbench.search.base import Limits, Searcher
from attnbench.tasks.base import Loss, Metrics, TaskSpec, tasks
from attnbench.tasks.loss import smoothed_cross_entropy

SENTENCES = 64
"""Sentences decoded at a time where they are not in batches yet."""
SAMPLE = 256
"""Sentences of a split on which attention is measured: the first ones."""


@tasks.register
class TranslationSpec(Recipe, TaskSpec):
    """Sentence translation on a parallel corpus; every field but the scores is part of the data's recipe."""

    kind: Literal["translation"] = "translation"
    bleu: Literal["tok_lc", "tok"] = "tok_lc"
    """The score called `bleu`, on tokenised text: lower-cased (`tok_lc`) or as it is (`tok`)."""
    compound_split: bool = False
    """Score `a-b` as `a ##AT##-##AT## b` on both sides, as the papers do on En-De."""
    primary: ClassVar[str] = "test/bleu"

    @field_validator("bleu", mode="before")
    @classmethod
    def _tokenised(cls, kind: Any) -> Any:
        if kind in ("13a", "13a_lc"):
            raise ValueError(
                f"'{kind}' tokenises by itself, and this score is taken on tokenised text; write tok_lc or tok: "
                "sacrebleu's own is always measured too, as bleu_13a"
            )
        return kind

    def data_recipe(self) -> Recipe:
        """The part that decides what the prepared data look like."""
        return Recipe.model_validate({name: getattr(self, name) for name in Recipe.model_fields})

    def model_sizes(self) -> Sizes:
        source, target, joint = self.sizes()
        return Sizes(source, target, joint, PAD)

    def bind(self) -> Translation:
        return Translation(self)

    def data_path(self, cache: Path) -> Path:
        return prepared_path(self.data_recipe(), cache)

    def prepare(self, cache: Path, source: Path | None, offline: bool) -> Path:
        return prepare(self.data_recipe(), cache=cache, source=source, offline=offline)

    def open(self, at: Path) -> Data:
        return Data.open(at)


class Translation:
    """See TranslationSpec."""

    def __init__(self, spec: TranslationSpec) -> None:
        self.spec = spec
        self.limits = Limits(bos=BOS, eos=EOS, pad=PAD)

    def check(self, model: Seq2SeqModel, data: Data) -> None:
        for split in SPLITS:
            widest = data.split(split).ids.widest
            if model.max_length is not None and widest > model.max_length:
                raise AttnbenchError(
                    f"the longest pair of the {split} split has {widest} tokens, and the model reads "
                    f"{model.max_length}; raise model.max_length"
                    + (", or lower task.max_length (in words)" if split == "train" else "")
                )

    def count(self, batch: Batch) -> int:
        return int(batch.target_valid.sum())

    def loss(self, model: Seq2SeqModel, batch: Batch, smoothing: float) -> Loss:
        memory = model.encode(Source(batch.source, batch.source_valid))
        hidden = model.decode(memory, batch.target_in).hidden
        logits = model.logits(hidden[batch.target_valid])  # padding never reaches the vocabulary
        return Loss(*smoothed_cross_entropy(logits, batch.target_out[batch.target_valid], smoothing))

    @torch.no_grad()
    def validate(self, model: Seq2SeqModel, data: Data, split: str, tokens: int) -> dict[str, float]:
        device = next(model.parameters()).device
        nats, count = 0.0, 0
        for batch in data.eval_batches(split, tokens=tokens):
            nats += self.loss(model, _to(batch, device), 0.0).nll.item()
            count += self.count(batch)
        return {"loss": nats / max(1, count), "ppl": perplexity(nats, count) or float("nan")}

    @torch.no_grad()
    def evaluate(self, model: Seq2SeqModel, data: Data, split: str, searcher: Searcher, tokens: int) -> Metrics:
        device = next(model.parameters()).device
        decoded: dict[int, list[int]] = {}
        unfinished = 0
        started = time.perf_counter()
        for batch in data.eval_batches(split, tokens=tokens):
            source = Source(batch.source.to(device), batch.source_valid.to(device))
            found = searcher(model, source, self.limits)
            unfinished += sum(not best[0].finished for best in found)
            decoded |= {line: best[0].tokens for line, best in zip(batch.index.tolist(), found, strict=True)}
        seconds = time.perf_counter() - started
        lines = [data.target_vocabulary.decode(decoded[line]) for line in range(len(decoded))]
        metrics = self.score(data, split, lines)
        produced = sum(len(tokens) + 1 for tokens in decoded.values())
        metrics.values["unfinished"] = unfinished
        metrics.values.update({"decode_seconds": seconds, "decode_tokens_per_s": produced / max(seconds, 1e-9)})
        return metrics

    @torch.no_grad()
    def translate(self, model: Seq2SeqModel, data: Data, lines: Sequence[str], searcher: Searcher) -> list[str]:
        """Translations of raw source lines, detokenised, in their order."""
        device = next(model.parameters()).device
        encoded = [[*data.source_vocabulary.encode(line), EOS] for line in data.tokenize(lines)]
        order = sorted(range(len(encoded)), key=lambda line: len(encoded[line]))
        found: dict[int, str] = {}
        for start in range(0, len(order), SENTENCES):
            chosen = order[start : start + SENTENCES]
            rows = [torch.tensor(encoded[line]) for line in chosen]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)
            best = searcher(model, Source(padded, padded != PAD), self.limits)
            found |= {
                line: data.target_vocabulary.decode(each[0].tokens) for line, each in zip(chosen, best, strict=True)
            }
        return data.detokenize([found[line] for line in range(len(encoded))])

    def score(self, data: Data, split: str, lines: list[str]) -> Metrics:
        """Scores of tokenised output lines, in the order of the split."""
        pairs = data.split(split)
        references = list(pairs.target)
        plain, raw = data.detokenize(lines), list(pairs.references)
        ours, right = lines, references
        if self.spec.compound_split and self.spec.split_hyphens:  # `a @-@ b` is a hyphen split once already
            ours, right = ([line.replace(" @-@ ", "-") for line in side] for side in (lines, references))
        bleu = corpus_bleu(ours, right, self.spec.bleu, compound_split=self.spec.compound_split)
        sacre = corpus_bleu(plain, raw, "13a_lc" if self.spec.lowercase else "13a")
        chrf = corpus_chrf(plain, [line.lower() for line in raw] if self.spec.lowercase else raw)
        scores = {"bleu": bleu, "bleu_13a": sacre, "chrf": chrf}
        return Metrics(
            {name: score.value for name, score in scores.items()},
            {name: score.signature for name, score in scores.items()},
            {"sentences": len(lines)},
            {"txt": lines, "ref.txt": references, "detok.txt": plain},
        )

    @torch.no_grad()
    def inspect(self, model: Seq2SeqModel, data: Data, split: str, tokens: int) -> Metrics:
        device = next(model.parameters()).device
        sites = SiteSparsity()
        seen = 0
        for whole in data.eval_batches(split, tokens=tokens):
            chosen = whole.index < SAMPLE
            if not chosen.any():
                continue
            batch = _to(Batch(*(tensor[chosen] for tensor in whole)), device)
            seen += int(chosen.sum())
            memory = model.encode(Source(batch.source, batch.source_valid), need_weights=True)
            maps = model.decode(memory, batch.target_in, need_weights=True).maps or {}
            for site, layers in maps.items():
                queries = batch.source_valid if site == "encoder_self" else batch.target_valid
                for weights in layers:
                    sites.add(site, weights, queries)
        values = {name: value for name, value in sites.numbers().items() if value is not None}
        return Metrics(values, {}, {"attended": seen}, {})


def _to(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device) for tensor in batch))
