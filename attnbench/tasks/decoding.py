"""Outputs of many sources: as many at once as the device takes, and fewer where its memory is too small."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from attnbench.core.memory import is_full
from attnbench.core.tree import map_batch
from attnbench.data.base import PAD, Batch
from attnbench.models.base import Seq2SeqModel, Source
from attnbench.search.base import Hypothesis, Searcher, SpecialIds, computing
from attnbench.tasks.sources import source_of

log = logging.getLogger("attnbench")

SENTENCES = 64
"""Sentences at a time, where they are not in batches yet."""
WIDE_BEAM = 16
"""Hypotheses a sentence, above which fewer sentences are searched at once."""
ON_A_GPU = 1 << 15
"""Tokens a side, at least, of a batch that is decoded there: a step of so many takes no longer than one of few."""

Decoded = dict[int, Hypothesis]
"""Line of its split -> the best output."""


@torch.no_grad()
def decode(model: Seq2SeqModel, batches: Iterable[Batch], searcher: Searcher, special: SpecialIds) -> Decoded:
    """The best output of each line, a batch at a time as they are given."""
    device = next(model.parameters()).device
    decoded: Decoded = {}
    with computing(model, searcher.spec):
        for batch in batches:
            found = searcher(model, source_of(batch, device), special)
            decoded |= {line: best[0] for line, best in zip(batch.index.tolist(), found, strict=True)}
    return decoded


def decode_large(
    model: Seq2SeqModel, batches: Callable[[int], Iterator[Batch]], searcher: Searcher, tokens: int,
    decode: Callable[[Batch], Decoded],
) -> Decoded:  # fmt: skip
    """As much at once as a GPU does in the time of one batch, in halves where its memory is too small.

    batches: of so many padded tokens a side at most. tokens: of a usual batch. decode: how one is decoded.
    """
    most = max(tokens, ON_A_GPU) if next(model.parameters()).device.type == "cuda" else tokens
    decoded: Decoded = {}
    full = sys.maxsize  # places of a batch that was too large
    with computing(model, searcher.spec):
        for whole in batches(_at_once(searcher, most)):
            waiting = [whole]
            while waiting:
                batch = waiting.pop()
                places, single = batch.source.numel(), len(batch.index) == 1
                found = None
                if single or places < full:
                    try:
                        found = decode(batch)
                    except RuntimeError as error:
                        if single or not is_full(error):
                            raise
                        full = places
                        log.warning("the GPU's memory is too small to decode %d sentences at once", len(batch.index))
                if found is None:  # outside of the handler, which holds what was computed
                    torch.cuda.empty_cache()
                    waiting += _halves(batch)
                else:
                    decoded |= found
    return decoded


@torch.no_grad()
def decode_ids(
    model: Seq2SeqModel, sources: Sequence[Sequence[int]], searcher: Searcher, special: SpecialIds
) -> list[Hypothesis]:
    """The best output of each source: its ids, EOS included."""
    device = next(model.parameters()).device
    order = sorted(range(len(sources)), key=lambda line: len(sources[line]))
    found: Decoded = {}
    with computing(model, searcher.spec):
        sentences = _at_once(searcher, SENTENCES)
        for start in range(0, len(order), sentences):
            chosen = order[start : start + sentences]
            rows = [torch.tensor(sources[line]) for line in chosen]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(device)
            best = searcher(model, Source(padded, padded != PAD), special)
            found |= {line: each[0] for line, each in zip(chosen, best, strict=True)}
    return [found[line] for line in range(len(sources))]


def _at_once(searcher: Searcher, most: int) -> int:
    """How many sentences, or tokens of them, are searched at once where `most` are by a usual beam: a wide one takes
    the memory of many."""
    return max(1, most * WIDE_BEAM // max(searcher.spec.places, WIDE_BEAM))


def _halves(batch: Batch) -> list[Batch]:
    middle = len(batch.index) // 2
    return [map_batch(lambda tensor, rows=rows: tensor[rows], batch) for rows in (slice(middle), slice(middle, None))]
