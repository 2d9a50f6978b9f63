"""Recurrent layers step by step read padded rows as torch reads packed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnbench.core import waiting
from attnbench.models._reading import read
from attnbench.models.base import Sizes, Source, models

LENGTHS = torch.tensor([5, 1, 7, 3])


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_states_and_gradients_are_those_of_packed_rows(cell: Any, layers: int, bidirectional: bool):
    torch.manual_seed(0)
    module = cell(4, 6, layers, batch_first=True, bidirectional=bidirectional).double()
    inputs = torch.randn(4, 7, 4, dtype=torch.float64, requires_grad=True)
    packed, last = module(pack_padded_sequence(inputs, LENGTHS, batch_first=True, enforce_sorted=False))
    wanted = [pad_packed_sequence(packed, batch_first=True)[0], *(last if isinstance(last, tuple) else (last,))]
    states, ends = read(module, inputs, torch.arange(7) < LENGTHS[:, None])
    upstream = [torch.randn_like(each) for each in wanted]
    of = [inputs, *module.parameters()]
    for mine, theirs in zip([states, *ends], wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad([states, *ends], of, upstream), torch.autograd.grad(wanted, of, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_row_without_a_token_ends_where_it_began():
    module = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
    states, ends = read(module, torch.randn(2, 3, 4), torch.tensor([[False] * 3, [True] * 3]))
    assert not states[0].any()
    assert not any(each[:, 0].any() for each in ends)
    assert all(each[:, 1].any() for each in ends)


def test_layers_drop_in_training_alone():
    module = nn.GRU(4, 6, 2, batch_first=True, dropout=0.5)
    inputs, valid = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    once, twice = (read(module, inputs, valid)[0] for _ in range(2))
    assert not torch.equal(once, twice)
    module.eval()
    once, twice = (read(module, inputs, valid)[0] for _ in range(2))
    assert torch.equal(once, twice)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_an_encoder_that_must_not_wait_reads_the_same(kind: str):
    torch.manual_seed(1)
    raw = {"kind": kind, "layers": 2, "width": 8, "bidirectional": True}
    model = models.parse(raw).build(Sizes(13, 13, False, 0)).double().eval()
    source = Source(torch.randint(3, 13, (5, 7)), torch.arange(7) < torch.tensor([5, 1, 7, 3, 0])[:, None])
    wanted = model.encode(source)
    with waiting.forbid():
        found = model.encode(source)
    for mine, theirs in zip(found.initial, wanted.initial, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.cross.values, wanted.cross.values, rtol=1e-12, atol=1e-12)
