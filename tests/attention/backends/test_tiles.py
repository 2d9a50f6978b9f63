"""Tiles with their neighbours are slices of a padded row, and their gradients what autograd makes of those."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.backends._tiles import Cut, around


def sliced(states, cut, tokens):
    count = -(-states.shape[2] // cut.size)
    end = count * cut.size - states.shape[2] + cut.right
    padded = torch.nn.functional.pad(states, (0, 0, cut.left, end))
    tiles = [padded[:, :, at * cut.size : at * cut.size + cut.width] for at in range(count)]
    return torch.stack(tiles, 2), states[:, :, :tokens]


@pytest.mark.parametrize("length", [1, 3, 4, 9, 16])
@pytest.mark.parametrize("cut", [Cut(4), Cut(4, 4, 4), Cut(4, 3), Cut(4, 0, 2), Cut(8, 1, 7)], ids=str)
@pytest.mark.parametrize("tokens", [0, 2])
def test_tiles_and_their_derivatives(length, cut, tokens):
    states = torch.randn(2, 3, length, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    states.requires_grad_()
    found = around(states, cut, tokens)
    for ours, wanted in zip(found, sliced(states, cut, tokens), strict=True):
        assert torch.equal(ours, wanted)
    both = [sum(part.pow(3).sum() for part in made(states, cut, tokens)) for made in (around, sliced)]
    once = [torch.autograd.grad(each, states, create_graph=True)[0] for each in both]
    torch.testing.assert_close(*once)
    torch.testing.assert_close(*(torch.autograd.grad(each.pow(2).sum(), states)[0] for each in once))
