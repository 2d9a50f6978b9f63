"""The laws of a score (attention/scores/base.py), for every member of the registry."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.scores.base import Score, scores
from attnbench.attention.types import Dims

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 4, 5, 6
EACH = pytest.mark.parametrize("kind", scores.kinds())


def build(kind: str, heads: int = HEADS) -> Score:
    torch.manual_seed(0)
    return scores.parse(kind).build(Dims(heads=heads, query_width=WIDTH, key_width=WIDTH)).double()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@EACH
@pytest.mark.parametrize("heads", [1, HEADS])
def test_each_pair_is_scored_by_itself(kind, heads):
    score = build(kind, heads)
    query, states = draw(BATCH, heads, QUERIES, WIDTH), draw(BATCH, heads, KEYS, WIDTH, seed=1)
    keys = score.keys(states)
    assert keys.shape == (BATCH, heads, KEYS, score.key_width)
    whole = score(query, keys)
    assert whole.shape == (BATCH, heads, QUERIES, KEYS)
    for i in range(QUERIES):
        for j in range(KEYS):
            alone = score(query[1:, :, i : i + 1], score.keys(states[1:, :, j : j + 1]))
            torch.testing.assert_close(alone[0, :, 0, 0], whole[1, :, i, j], rtol=0, atol=1e-12)


@EACH
def test_gradients_equal_finite_differences(kind):
    score = build(kind)
    query, states = draw(1, HEADS, 2, WIDTH).requires_grad_(), draw(1, HEADS, 3, WIDTH, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, s, *_: score(q, score.keys(s)), (query, states, *score.parameters()))


@pytest.mark.parametrize("kind", [kind for kind in scores.kinds() if build(kind).scale is not None])
@pytest.mark.parametrize("width", [WIDTH, 9])
def test_its_scale_says_what_kernels_multiply(kind, width):
    """They answer in its place, and take its keys for what queries are multiplied with."""
    score = scores.parse(kind).build(Dims(heads=HEADS, query_width=width, key_width=width)).double()
    query, keys = draw(BATCH, HEADS, QUERIES, width), score.keys(draw(BATCH, HEADS, KEYS, width, seed=1))
    assert score.scale is not None
    torch.testing.assert_close(score(query, keys), score.scale * query @ keys.mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in scores.kinds() if scores.get(kind).any_rank])
def test_it_compares_tiles_where_it_says_so(kind):
    score, tiles = build(kind), 2
    query, states = draw(BATCH, HEADS, tiles, QUERIES, WIDTH), draw(BATCH, HEADS, KEYS, WIDTH, seed=1)
    keys = score.keys(states)
    found = score(query, keys.unsqueeze(2).expand(-1, -1, tiles, -1, -1))
    assert found.shape == (BATCH, HEADS, tiles, QUERIES, KEYS)
    for tile in range(tiles):
        torch.testing.assert_close(found[:, :, tile], score(query[:, :, tile], keys), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in scores.kinds() if scores.get(kind).takes_feature])
def test_it_hears_a_coverage_where_it_says_so(kind):
    width = 2
    torch.manual_seed(0)
    dims = Dims(heads=HEADS, query_width=WIDTH, key_width=WIDTH, feature_width=width)
    score = scores.parse(kind).build(dims).double()
    query, keys = draw(BATCH, HEADS, QUERIES, WIDTH), score.keys(draw(BATCH, HEADS, KEYS, WIDTH, seed=1))
    feature = draw(BATCH, QUERIES, KEYS, width, seed=2)
    found = score(query, keys, feature)
    assert found.shape == (BATCH, HEADS, QUERIES, KEYS)
    feature[1, 2, 3] += 1
    told = (score(query, keys, feature) != found).nonzero().tolist()
    assert told == [[1, head, 2, 3] for head in range(HEADS)]


@EACH
def test_no_keys_no_scores(kind):
    score = build(kind, 1)
    for queries, keys in ((3, 0), (0, 3)):
        found = score(draw(2, 1, queries, WIDTH), score.keys(draw(2, 1, keys, WIDTH)))
        assert found.shape == (2, 1, queries, keys)


@EACH
def test_each_has_a_description_and_a_source(kind):
    cls = scores.get(kind)
    assert cls.__doc__
    assert cls.paper
