"""What every task on sentence pairs does the same way: its data, loss, decoding and attention. Tasks add the scores."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from attnbench.core import native
from attnbench.core.errors import AttnbenchError, SpecError
from attnbench.core.run_files import REFERENCES
from attnbench.data.base import BOS, EOS, PAD, UNK, Batch
from attnbench.data.batching import rounded
from attnbench.data.corpus import Data
from attnbench.data.datasets.base import SPLITS
from attnbench.data.fertility import with_fertilities
from attnbench.data.prepare import changed_files, is_prepared, prepare, prepared_path
from attnbench.data.recipe import Recipe
from attnbench.data.tokenizers.word import WordSpec
from attnbench.metrics.bleu import Score
from attnbench.metrics.likelihood import perplexity
from attnbench.metrics.sparsity import SiteSparsity
from attnbench.models.base import Seq2SeqModel, Sizes, Source
from attnbench.models.fertility.base import Fertility
from attnbench.search.base import Searcher, SpecialIds
from attnbench.tasks.base import Loss, Metrics, TaskSpec
from attnbench.tasks.decoding import SENTENCES, Decoded, decode, decode_ids, decode_large
from attnbench.tasks.lessons import teach
from attnbench.tasks.loss import IGNORED, output_loss
from attnbench.tasks.sources import source_of, to_device

log = logging.getLogger("attnbench")

LESSON = 1 << 16
"""Tokens of a batch of aligned sources at most, which so many sentences never reach."""
NO_TOKEN = -1
"""An id that no output can hold."""
SAMPLE = 256
"""Sentences of a split on which attention is measured: the first ones."""


class PairSpec(Recipe, TaskSpec):
    """A task on a parallel corpus: the fields of the data's recipe, and those that a task adds for its scores."""

    @property
    def corpus(self) -> str:
        return self.dataset.kind

    @property
    def lowercased(self) -> bool:
        return self.lowercase

    def model_sizes(self) -> Sizes:
        source, target, joint = self.sizes()
        words = self.dataset.longest_words() if isinstance(self.tokenizer, WordSpec) else None
        return Sizes(source, target, joint, PAD, None if words is None else words + 1)

    def data_path(self, cache: Path) -> Path:
        return prepared_path(self, cache)

    def prepared(self, cache: Path) -> Path | None:
        return self.data_path(cache) if is_prepared(self, cache) else None

    def own_files(self, source: Path | None) -> list[Path]:
        return self.dataset.local_files(source)

    def changed_files(self, cache: Path, source: Path | None) -> list[Path]:
        return changed_files(self, cache, source)

    def prepare(self, cache: Path, source: Path | None, offline: bool) -> Path:
        return prepare(self, cache=cache, source=source, offline=offline)

    def open(self, at: Path) -> Data:
        return Data.open(at)


class PairTask(ABC):
    """A Task but for its scores."""

    kept_texts: tuple[str, ...] = (REFERENCES, "src.txt")

    def __init__(self) -> None:
        self.special = SpecialIds(bos=BOS, eos=EOS, pad=PAD)

    @abstractmethod
    def bleu(self, lines: Sequence[str], references: Sequence[str]) -> Score:
        """The score called `bleu` of tokenised lines against tokenised references."""

    @abstractmethod
    def score(self, data: Data, split: str, lines: list[str]) -> Metrics:
        """Scores of tokenised output lines, in the order of the split."""

    @abstractmethod
    def written(self, data: Data, lines: list[str]) -> list[str]:
        """Tokenised output lines as a person is shown them."""

    def require_texts(self, data: Data, split: str) -> None:
        """Raise DataError where the split lacks what `score` compares with, before it is decoded."""
        _ = data.split(split).references

    def references(self, data: Data, split: str) -> list[str]:
        """The targets of a split, tokenised."""
        return list(data.split(split).target)

    def texts(self, data: Data, split: str) -> dict[str, list[str]]:
        found = {REFERENCES: self.references(data, split), "src.txt": list(data.split(split).source)}
        return {ending: found[ending] for ending in self.kept_texts}

    def check(self, model: Seq2SeqModel, data: Data) -> None:
        for split in SPLITS:
            widest = data.split(split).ids.widest
            if model.max_length is not None and widest > model.max_length:
                raise AttnbenchError(
                    f"the longest pair of the {split} split has {widest} tokens, and the model reads "
                    f"{model.max_length}; raise model.max_length" + _or_shorter(data.recipe, split)
                )

    def adapt(self, model: Seq2SeqModel, data: Data, seed: int, *, fresh: bool) -> Data:
        fertility = model.source_fertility
        if fertility is None and any(isinstance(module, Fertility) for module in model.modules()):
            raise AttnbenchError(
                f"{type(model).__name__} has a fertility and does not tell it, so that it would learn nothing; give it "
                "the property source_fertility"
            )
        if fertility is not None and fertility.needs == "oracle":
            return with_fertilities(data)
        if fertility is not None and fertility.needs == "lessons" and fresh:
            teach(fertility, data.path, data.manifest, seed, lambda: _lessons(with_fertilities(data)))
        return data

    def count(self, batch: Batch) -> int:
        return int(batch.target_valid.sum())

    def sentences(self, batch: Batch) -> int:
        return len(batch.target_valid)

    def loss(self, model: Seq2SeqModel, batch: Batch, smoothing: float) -> Loss:
        batch, rows = to_device((batch, _without_padding(batch)), next(model.parameters()).device)
        memory = model.encode(source_of(batch))
        hidden = model.decode(memory, batch.target_in, valid=batch.target_valid).hidden.flatten(0, 1)
        if rows is None:
            target = batch.target_out.masked_fill(~batch.target_valid, IGNORED).flatten()
        else:
            hidden, target = hidden.index_select(0, rows), batch.target_out.flatten().index_select(0, rows)
        return Loss(*output_loss(model, hidden, target, smoothing))

    def rounded(self, model: Seq2SeqModel, batch: Batch) -> Batch:
        return rounded(batch, model.max_length)

    @torch.no_grad()
    def validate(self, model: Seq2SeqModel, data: Data, split: str, tokens: int) -> dict[str, float]:
        nats, count = 0.0, 0
        for batch in data.eval_batches(split, tokens=tokens):
            nats += self.loss(model, batch, 0.0).nll.item()
            count += self.count(batch)
        return {"loss": nats / max(1, count), "ppl": perplexity(nats, count) or float("nan")}

    def decode(
        self, model: Seq2SeqModel, batches: Iterable[Batch], searcher: Searcher, *, to_limit: bool = False
    ) -> Decoded:
        return decode(model, batches, searcher, self.special._replace(eos=NO_TOKEN) if to_limit else self.special)

    def _decode_all(
        self, model: Seq2SeqModel, data: Data, split: str, searcher: Searcher, tokens: int,
        lines: NDArray[np.int64] | None = None,
    ) -> Decoded:  # fmt: skip
        """A split, or its pairs at `lines`."""
        return decode_large(
            model, lambda most: data.eval_batches(split, tokens=most, lines=lines), searcher, tokens,
            lambda batch: self.decode(model, [batch], searcher),
        )  # fmt: skip

    def evaluate(
        self, model: Seq2SeqModel, data: Data, split: str, searcher: Searcher, tokens: int, *, brief: bool = False
    ) -> Metrics:
        if not brief:
            self.require_texts(data, split)
        started = native.clock()
        decoded = self._decode_all(model, data, split, searcher, tokens)
        seconds = native.clock() - started
        lines = [data.target_vocabulary.decode(decoded[line].tokens) for line in range(len(decoded))]
        if brief:
            return Metrics({"bleu": self.bleu(lines, self.references(data, split)).value}, {}, {}, {})
        metrics = self.score(data, split, lines)
        produced = sum(len(best.tokens) + best.finished for best in decoded.values())  # a cut one has no end
        metrics.values["unfinished"] = sum(not best.finished for best in decoded.values())
        metrics.values.update({"decode_seconds": seconds, "decode_tokens_per_s": produced / max(seconds, 1e-9)})
        return metrics._replace(outputs={**metrics.outputs, **self.texts(data, split)})

    def sample_bleu(self, model: Seq2SeqModel, data: Data, searcher: Searcher, tokens: int, size: int) -> float:
        """`bleu` of training sentences: `size` of them, and no more than valid has, at equal distances."""
        pairs = data.split("train")
        size = min(size, len(data.split("valid")), len(pairs))
        chosen = np.arange(size) * len(pairs) // size
        decoded = self._decode_all(model, data, "train", searcher, tokens, chosen)
        lines = [data.target_vocabulary.decode(decoded[line].tokens) for line in chosen.tolist()]
        return self.bleu(lines, [pairs.target[line] for line in chosen.tolist()]).value

    def translate(self, model: Seq2SeqModel, data: Data, lines: Sequence[str], searcher: Searcher) -> list[str]:
        """Outputs for raw source lines as a person is shown them, in their order."""
        encoded = [[*data.source_vocabulary.encode(line), EOS] for line in data.tokenize(lines)]
        unknown = sum(ids.count(UNK) for ids in encoded)
        if unknown:  # as where the case or the language is another
            tokens = sum(map(len, encoded)) - len(encoded)
            log.warning("%d of the %d tokens of this text are unknown to the vocabulary", unknown, tokens)
        for number, ids in enumerate(encoded, 1):
            if model.max_length is not None and len(ids) > model.max_length:
                raise SpecError(
                    f"line {number} has {len(ids)} tokens, and the model reads {model.max_length}; cut it, or give "
                    "--set model.max_length=N, if its positions are not learned ones"
                )
        said = [line for line, ids in enumerate(encoded) if len(ids) > 1]  # of an empty one nothing is
        best = decode_ids(model, [encoded[line] for line in said], searcher, self.special)
        found = dict(zip(said, (data.target_vocabulary.decode(each.tokens) for each in best), strict=True))
        return self.written(data, [found.get(line, "") for line in range(len(encoded))])

    @torch.no_grad()
    def inspect(self, model: Seq2SeqModel, data: Data, split: str, tokens: int) -> Metrics:
        device = next(model.parameters()).device
        sites = SiteSparsity()
        seen = 0
        first = np.arange(min(SAMPLE, len(data.split(split))))
        for batch in data.eval_batches(split, tokens=tokens, lines=first):
            batch = to_device(batch, device)
            seen += len(batch.index)
            memory = model.encode(source_of(batch), need_weights=True)
            maps = model.decode(memory, batch.target_in, need_weights=True).maps or {}
            for site, layers in maps.items():
                queries = batch.source_valid if site == "encoder_self" else batch.target_valid
                for weights in layers:
                    sites.add(site, weights, queries)
        values = {name: value for name, value in sites.numbers().items() if value is not None}
        if model.source_fertility is not None:
            values |= {f"fertility/{name}": value for name, value in model.source_fertility.report().items()}
        return Metrics(values, {}, {"attended": seen}, {})


def _or_shorter(recipe: Recipe, split: str) -> str:
    if recipe.block is not None:
        return ", or lower task.block"
    return ", or lower task.max_length (in words)" if split == "train" else ""


def _without_padding(batch: Batch) -> torch.Tensor | None:
    """The places that hold target tokens, so that padding never reaches the vocabulary; None where they cannot be told
    without waiting."""
    valid = batch.target_valid
    return valid.flatten().nonzero()[:, 0] if valid.device.type == "cpu" else None


def _lessons(aligned: Data) -> tuple[list[Source], list[Source]]:
    """Of training and of validation."""
    train, valid = (
        [source_of(batch) for batch in aligned.eval_batches(split, tokens=LESSON, rows=SENTENCES)]
        for split in ("train", "valid")
    )
    return train, valid
