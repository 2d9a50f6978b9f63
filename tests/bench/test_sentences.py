"""Sentences of random words have the lengths and the words that are told."""

from __future__ import annotations

import torch

from attnbench.bench import sentences
from attnbench.bench.sentences import Load
from attnbench.data.base import BOS, EOS, PAD, SPECIALS
from attnbench.models.base import Sizes

CPU = torch.device("cpu")


def test_sentences_have_the_lengths_that_are_told():
    found = sentences.batches(4, CPU)
    for batch in found:
        assert batch.source.shape[0] * max(batch.source.shape[1], batch.target_out.shape[1]) <= sentences.TOKENS
        assert int(batch.source_valid.sum(1).min()) >= 5
        assert int(batch.source_valid.sum(1).max()) <= 61
        assert bool((batch.target_in[:, 0] == BOS).all())
        last = batch.target_valid.sum(1, keepdim=True) - 1
        assert bool((batch.target_out.gather(1, last) == EOS).all())
        assert bool((batch.target_out[~batch.target_valid] == PAD).all())
        assert bool((batch.target_in[~batch.target_valid] == PAD).all())
        assert torch.equal(
            batch.target_in[:, 1:][batch.target_valid[:, 1:]], batch.target_out[:, :-1][batch.target_valid[:, 1:]]
        )
    widths = [batch.target_out.shape[1] for batch in found]
    assert widths == sorted(widths)


def test_shorter_and_longer_sentences_of_fewer_words():
    sizes = Sizes(30, 20, False, PAD)
    for longest in (1, 3, 9, 200):
        for batch in sentences.batches(3, CPU, 600, sizes, longest):
            lengths = batch.source_valid.sum(1)
            assert min(4, longest) + 1 <= int(lengths.min()) <= int(lengths.max()) <= longest + 1
            assert int(batch.source.max()) < 30
            assert int(batch.target_out.max()) < 20
            words = batch.target_out[batch.target_valid & (batch.target_out != EOS)]
            assert int(words.min()) >= len(SPECIALS)
    usual, longer = (sentences.batches(1, CPU, 3000, sizes, longest)[0] for longest in (60, 120))
    assert 1.5 < longer.source.shape[1] / usual.source.shape[1] < 2.5


def test_what_is_decoded():
    batch = Load(3, 7, None).sources(CPU, Sizes(30, 20, False, PAD))
    assert batch.source.shape == (3, 7)
    assert bool(batch.source_valid.all())
    assert bool((batch.source[:, -1] == EOS).all())
    assert int(batch.source.max()) < 30
    assert [Load(3, 7, beam).group("mini") for beam in (None, 1, 4)] == [
        "mini, 3 x 7", "mini, greedy, 3 x 7", "mini, beam 4, 3 x 7",
    ]  # fmt: skip
