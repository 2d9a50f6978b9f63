"""Attention between the words of sentence pairs that people give, not of a prepared corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnbench.core.errors import SpecError
from attnbench.data.alignment.links import words
from attnbench.data.base import BOS, EOS, PAD
from attnbench.data.corpus import Data
from attnbench.data.tokenizers.base import Vocabulary
from attnbench.metrics.alignment import word_weights
from attnbench.models.base import Seq2SeqModel, Source, at_most_one

SENTENCES = 32


@torch.no_grad()
def word_attention(
    model: Seq2SeqModel, data: Data, sources: Sequence[str], targets: Sequence[str]
) -> list[NDArray[np.float64]]:
    """[T, S] for each pair of tokenised lines: what each target word, told to the decoder, attended to of the source.

    A mean over layers and heads, of gates the shares where they sum to more than 1; pieces are summed over a source
    word and averaged over a target word; EOS is left out.
    Raises SpecError where the model tells no attention, and for a line that is longer than it reads.
    """
    given = [_pieces(line, data, data.source_vocabulary) for line in sources]
    told = [_pieces(line, data, data.target_vocabulary) for line in targets]
    for number, sides in enumerate(zip(given, told, strict=True), 1):
        for side, pieces in zip(("source", "target"), sides, strict=True):
            count = len(_flat(pieces)) + 1
            if model.max_length is not None and count > model.max_length:
                raise SpecError(
                    f"line {number} of the {side} has {count} tokens, and the model reads {model.max_length}; leave it "
                    "out of both files, or give --set model.max_length=N, if its positions are not learned ones"
                )
    order = sorted(range(len(given)), key=lambda line: len(_flat(given[line])))
    found: dict[int, NDArray[np.float64]] = {}
    for first in range(0, len(order), SENTENCES):
        lines = order[first : first + SENTENCES]
        weights = _decode(model, [_flat(given[line]) for line in lines], [_flat(told[line]) for line in lines])
        for line, table in zip(lines, weights, strict=True):
            sizes = [list(map(len, side[line])) for side in (given, told)]
            found[line] = word_weights(table[: sum(sizes[1]), : sum(sizes[0])], *sizes)
    return [found[line] for line in range(len(order))]


def _pieces(line: str, data: Data, vocabulary: Vocabulary) -> list[list[int]]:
    """The ids of each word."""
    return [vocabulary.encode(word) for word in words(line.lower() if data.recipe.lowercase else line)]


def _flat(pieces: list[list[int]]) -> list[int]:
    return [index for word in pieces for index in word]


def _decode(model: Seq2SeqModel, sources: list[list[int]], targets: list[list[int]]) -> list[NDArray[np.float64]]:
    """The tables of weights of a batch, padding and all."""
    device = next(model.parameters()).device
    data = _padded([[*ids, EOS] for ids in sources]).to(device)
    lengths = torch.tensor([len(ids) + 1 for ids in sources], device=device)
    valid = torch.arange(data.shape[1], device=device) < lengths[:, None]
    memory = model.encode(Source(data, valid), need_weights="cross")
    maps = model.decode(memory, _padded([[BOS, *ids] for ids in targets]).to(device), need_weights=True).maps
    cross = (maps or {}).get("cross")
    if not cross:
        raise SpecError("this model attends to nothing, so that there is no attention to judge")
    mean = at_most_one(torch.stack([weights.float().mean(1) for weights in cross]).mean(0))
    return list(mean.cpu().double().numpy())


def _padded(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)
