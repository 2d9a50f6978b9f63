"""Sentences of random words, on which models are timed."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from attnbench.core.tree import map_batch
from attnbench.data.base import BOS, EOS, PAD, SPECIALS, Batch
from attnbench.data.batching import cut
from attnbench.models.base import Sizes

WORDS = 10_000
"""Vocabulary, joint."""
TOKENS = 4096
"""Padded tokens a side of a training batch, at most."""
LONGEST = 60
"""Words of a sentence, at most."""
STEPS = 30
"""Tokens that every output has."""


def batches(
    count: int, device: torch.device, tokens: int | None = None, sizes: Sizes | None = None, longest: int = LONGEST
) -> list[Batch]:
    """Training batches at equal distances from short sentences to long ones: a source has 25 words give or take 10, 4
    to 60, a target as many give or take 3.

    tokens: padded ones a side, at most; None: TOKENS. sizes: of the vocabularies; None: WORDS. longest: instead of 60
    words, where all lengths are that many times as long.
    """
    draw = np.random.default_rng(0)
    scale, least = longest / LONGEST, min(4, longest)
    source = np.clip(np.rint(scale * draw.normal(25, 10, 6000)), least, longest).astype(int)
    target = np.clip(np.rint(source + scale * draw.normal(0, 3, 6000)), least, longest).astype(int)
    order = np.lexsort((source, target))
    widths = np.maximum(source, target)[order] + 1
    whole = list(itertools.pairwise(cut(widths, tokens or TOKENS)))
    chosen = [whole[int((place + 0.5) * len(whole) / count)] for place in range(count)]
    return [_batch(source[order[a:b]], target[order[a:b]], draw, device, sizes) for a, b in chosen]


def _batch(source: Any, target: Any, draw: np.random.Generator, device: torch.device, sizes: Sizes | None) -> Batch:
    def side(lengths: Any, words: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = draw.integers(len(SPECIALS), words, (len(lengths), lengths.max() + 1))
        place = np.arange(drawn.shape[1])[None]
        drawn[place > lengths[:, None]] = PAD
        drawn[place == lengths[:, None]] = EOS
        return torch.from_numpy(drawn), torch.from_numpy(place <= lengths[:, None])

    source_words, target_words = (WORDS, WORDS) if sizes is None else (sizes.source_vocab, sizes.target_vocab)
    sources, source_valid = side(source, source_words)
    out, valid = side(target, target_words)
    shifted = torch.cat([torch.full((len(out), 1), BOS), out[:, :-1]], 1).masked_fill(~valid, PAD)
    batch = Batch(sources, source_valid, shifted, out, valid, torch.arange(len(out)), source_valid.long())
    return map_batch(lambda tensor: tensor.to(device), batch)


class Load(NamedTuple):
    """What is decoded: so many sources of one length, EOS counted, with a beam of so many; 1 is greedy search, None the
    search that a model brings."""

    rows: int
    length: int
    beam: int | None

    def group(self, size: str) -> str:
        searched = "" if self.beam is None else "greedy, " if self.beam == 1 else f"beam {self.beam}, "
        return f"{size}, {searched}{self.rows} x {self.length}"

    def sources(self, device: torch.device, sizes: Sizes | None = None) -> Batch:
        draw = np.random.default_rng(0)
        return _batch(np.full(self.rows, self.length - 1), np.full(self.rows, STEPS - 1), draw, device, sizes)
