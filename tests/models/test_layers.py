"""Embeddings, positions, feed-forward blocks and residuals against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attnbench.core.errors import AttnbenchError
from attnbench.models.layers import Embedding, FeedForward, Residual, embedding_table, sinusoid


@pytest.mark.parametrize("width", [1, 4, 7])
def test_sinusoid_is_the_formula(width):
    found = sinusoid(torch.tensor([0, 3, 1000]), width)
    for row, position in enumerate((0, 3, 1000)):
        for i in range(width):
            angle = position / 10000 ** (2 * (i // 2) / width)
            wanted = math.cos(angle) if i % 2 else math.sin(angle)
            assert found[row, i].item() == pytest.approx(wanted, abs=1e-12)


def test_the_table_has_unit_variance_after_scaling_and_a_zero_pad():
    torch.manual_seed(0)
    table = embedding_table(500, 64, 3)
    assert not table.weight[3].any()
    assert (table.weight * 64**0.5).std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("positions", ["sinusoid", "learned"])
def test_embedding_is_scaled_token_plus_position(positions):
    torch.manual_seed(0)
    table = embedding_table(9, 6, 0)
    embedding = Embedding(table, positions, 10, 0.0)
    tokens = torch.tensor([[1, 4, 8], [2, 2, 0]])
    added = embedding.waves if embedding.learned is None else embedding.learned.weight
    for start in (0, 7):
        found = embedding(tokens, start)
        for row in range(2):
            for place in range(3):
                wanted = table.weight[tokens[row, place]] * 6**0.5 + added[start + place]
                torch.testing.assert_close(found[row, place], wanted)


@pytest.mark.parametrize("positions", ["sinusoid", "learned"])
def test_positions_end(positions):
    embedding = Embedding(embedding_table(9, 6, 0), positions, 4, 0.0)
    assert embedding(torch.ones(1, 4, dtype=torch.long)).shape == (1, 4, 6)
    assert embedding(torch.ones(1, 1, dtype=torch.long), 3).shape == (1, 1, 6)
    for tokens, start in ((torch.ones(1, 5, dtype=torch.long), 0), (torch.ones(1, 1, dtype=torch.long), 4)):
        with pytest.raises(AttnbenchError, match=r"5 tokens.*model\.max_length 4.*task\.max_length"):
            embedding(tokens, start)


def test_positions_follow_the_weights_in_precision():
    embedding = Embedding(embedding_table(9, 6, 0), "sinusoid", 4, 0.0).double()
    assert embedding(torch.tensor([[1]])).dtype == torch.float64
    assert embedding.bfloat16()(torch.tensor([[1]])).dtype == torch.bfloat16


def test_waves_are_not_saved():
    assert list(Embedding(embedding_table(9, 6, 0), "sinusoid", 4, 0.0).state_dict()) == ["table.weight"]


def test_feed_forward_is_the_formula():
    torch.manual_seed(0)
    block = FeedForward(4, 6, 0.5).double().eval()
    nn.init.normal_(block.expand.bias)
    nn.init.normal_(block.contract.bias)
    states = torch.randn(2, 3, 4, dtype=torch.float64)
    inner = (states @ block.expand.weight.T + block.expand.bias).clamp(min=0)
    torch.testing.assert_close(block(states), inner @ block.contract.weight.T + block.contract.bias)
    assert not torch.equal(block.train()(states), block(states))  # dropout inside


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_residual_normalises_before_or_after(norm):
    torch.manual_seed(0)
    residual = Residual(4, norm, 0.0).double()
    nn.init.normal_(residual.norm.weight)
    nn.init.normal_(residual.norm.bias)

    def normed(x):
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * residual.norm.weight + residual.norm.bias

    states = torch.randn(2, 3, 4, dtype=torch.float64)
    wanted = states + normed(states) ** 3 if norm == "pre" else normed(states + states**3)
    torch.testing.assert_close(residual(states, lambda x: x**3), wanted)


def test_residual_drops_the_sublayer_and_not_the_path():
    torch.manual_seed(0)
    residual = Residual(64, "pre", 0.5).train()
    states = torch.full((1, 100, 64), 7.0)
    found = residual(states, torch.ones_like)
    assert set(found.unique().tolist()) == {7.0, 9.0}
    assert torch.equal(residual.eval()(states, torch.ones_like), states + 1)


@pytest.mark.parametrize("other", ["module", "forward", "hook", "shape"])
def test_residual_adds_by_itself_where_something_else_drops_or_looks(other):
    residual, seen = Residual(8, "pre", 0.5).train(), []
    if other == "module":
        setattr(residual, "dropout", nn.Identity())  # noqa: B010 - of another type than it says
    elif other == "forward":
        setattr(residual.dropout, "forward", lambda x: x)  # noqa: B010 - nor does this take as much
    elif other == "hook":
        residual.dropout.register_forward_hook(lambda module, given, out: seen.append(out) or torch.ones_like(out))
    states = torch.full((2, 3, 8), 7.0)
    found = residual(states, lambda x: torch.ones(8) if other == "shape" else torch.ones_like(x))
    assert set(found.unique().tolist()) == ({7.0, 9.0} if other == "shape" else {8.0})
    assert [each.shape for each in seen] == ([states.shape] if other == "hook" else [])
    assert all(set(each.unique().tolist()) <= {0.0, 2.0} for each in seen)
