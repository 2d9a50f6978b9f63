"""Outputs of many sources: in their order, in batches that fit, each as by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from attnbench.data.base import EOS, PAD, Batch
from attnbench.models.base import Source
from attnbench.search.base import Hypothesis, SpecialIds
from attnbench.search.beam import BeamSpec
from attnbench.search.greedy import GreedySpec
from attnbench.tasks import decoding
from attnbench.tasks.decoding import decode, decode_ids, decode_large

SPECIAL = SpecialIds(bos=1, eos=EOS, pad=PAD)
MODEL: Any = nn.Linear(1, 1)


class Echo:
    """A search that gives every source back, its EOS left out, and notes how many it was given at a time."""

    spec = GreedySpec()

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, model: Any, source: Source, special: SpecialIds) -> list[list[Hypothesis]]:
        assert not torch.is_grad_enabled()
        self.seen.append(len(source.data))
        rows = [ids[valid].tolist()[:-1] for ids, valid in zip(source.data, source.valid, strict=True)]
        return [[Hypothesis(row, 0.0, 0.0, True), Hypothesis([], -1.0, -1.0, True)] for row in rows]


def batch(index: list[int]) -> Batch:
    """Sources that are called by their lines."""
    data = torch.tensor([[10 + line, EOS] for line in index])
    there = torch.ones_like(data, dtype=torch.bool)
    return Batch(source=data, source_valid=there, target_in=data, target_out=data, target_valid=there,
                 index=torch.tensor(index))  # fmt: skip


def best(decoded: dict[int, Hypothesis]) -> dict[int, list[int]]:
    return {line: each.tokens for line, each in decoded.items()}


def test_the_best_output_of_each_line():
    assert best(decode(MODEL, [batch([3, 0]), batch([1])], Echo(), SPECIAL)) == {3: [13], 0: [10], 1: [11]}


@pytest.mark.parametrize("sentences", [1, 2, 64])
def test_sources_are_decoded_by_length_and_come_back_in_their_order(sentences: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "SENTENCES", sentences)
    echo, sources = Echo(), [[5, 6, 7, EOS], [8, EOS], [9, 9, EOS]]
    assert [each.tokens for each in decode_ids(MODEL, sources, echo, SPECIAL)] == [[5, 6, 7], [8], [9, 9]]
    assert echo.seen == {1: [1, 1, 1], 2: [2, 1], 64: [3]}[sentences]
    assert decode_ids(MODEL, [], echo, SPECIAL) == []


def test_a_batch_that_is_too_large_is_halved_and_none_as_large_is_tried_again():
    tried: list[int] = []

    def room_for_two(given: Batch) -> dict[int, Hypothesis]:
        tried.append(len(given.index))
        if len(given.index) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return decode(MODEL, [given], Echo(), SPECIAL)

    def batches(tokens: int) -> Iterator[Batch]:
        assert tokens == 100
        yield batch([0, 1, 2, 3, 4])
        yield batch([5, 6, 7, 8])
        yield batch([9])

    found = decode_large(MODEL, batches, Echo(), 100, room_for_two)
    assert best(found) == {line: [10 + line] for line in range(10)}
    assert tried == [5, 3, 2, 1, 2, 2, 2, 1]


def test_a_wide_beam_takes_fewer_sentences_at_once():
    narrow, wide, widest = (BeamSpec(size=size).build() for size in (5, 64, 5000))
    assert decoding._at_once(narrow, 4096) == 4096
    assert decoding._at_once(wide, 4096) == 1024
    assert decoding._at_once(widest, 64) == 1
    assert decoding._at_once(GreedySpec().build(), 64) == 64
