"""Each coverage against its formula over single floats, and what the score makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attnbench.attention.coverage.base import coverages
from attnbench.attention.modules.single_head import SingleHeadSpec
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.scores.base import scores
from attnbench.attention.site import Site
from attnbench.attention.transforms.softmax import SoftmaxSpec
from attnbench.attention.types import Dims, Positions
from attnbench.core.tree import select_batch

ROWS, KEYS, WIDTH, STEPS = 2, 4, 3, 3
DIMS = Dims(query_width=WIDTH, key_width=WIDTH)
VALID = torch.tensor([[True, True, True, True], [True, True, False, False]])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(raw: object) -> nn.Module:
    torch.manual_seed(1)
    return coverages.parse(raw).build(DIMS).double()


def advance(module: nn.Module, steps: int = STEPS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """C after each step, and the states, weights and queries it was made of."""
    states, queries = draw(ROWS, KEYS, WIDTH), draw(steps, ROWS, WIDTH, seed=1)
    weights = draw(steps, ROWS, KEYS, seed=2).softmax(-1)
    feature, seen = states.new_zeros(ROWS, KEYS, module.width), []
    kept = module.memorize(states)
    for step in range(steps):
        feature = module(feature, weights[step], queries[step], kept)
        seen.append(feature)
    return torch.stack(seen), states, weights, queries


def test_simple_is_the_sum_of_weights():
    found, _, weights, _ = advance(build("simple"))
    torch.testing.assert_close(found[..., 0], weights.cumsum(0))


def test_linguistic_divides_by_a_learned_fertility():
    module = build({"kind": "linguistic", "most": 3.0})
    found, states, weights, _ = advance(module)
    for row in range(ROWS):
        for key in range(KEYS):
            phi = 3.0 * torch.sigmoid(states[row, key] @ module.fertility.weight[0])
            assert 0 < phi < 3
            torch.testing.assert_close(found[-1, row, key, 0], weights[:, row, key].sum() / phi)


def test_a_fertility_next_to_nothing_leaves_gradients_finite():
    coverage = build("linguistic").float()
    with torch.no_grad():
        coverage.fertility.weight.fill_(-200.0)
    kept = coverage.memorize(torch.ones(1, 3, coverage.fertility.in_features))
    coverage(torch.zeros(1, 3, 1), torch.full((1, 3), 0.3), torch.zeros(1, 4), kept).sum().backward()
    assert coverage.fertility.weight.grad.isfinite().all()


def test_neural_is_a_gru_cell_a_key():
    """torch's own cell, with the parts of the input put side by side."""
    module = build({"kind": "neural", "units": 5})
    found, states, weights, queries = advance(module)
    cell = nn.GRUCell(1 + 2 * WIDTH, 5).double()
    with torch.no_grad():
        cell.weight_ih.copy_(torch.cat([module.of_weight.weight, module.of_key.weight, module.of_query.weight], 1))
        cell.bias_ih.copy_(module.of_key.bias)
        cell.weight_hh.copy_(module.of_before.weight)
        cell.bias_hh.copy_(module.of_before.bias)
    for row in range(ROWS):
        for key in range(KEYS):
            state = states.new_zeros(5)
            for step in range(STEPS):
                given = torch.cat([weights[step, row, key : key + 1], states[row, key], queries[step, row]])
                state = cell(given, state)
                torch.testing.assert_close(found[step, row, key], state)


def attention(score: str, coverage: str | None) -> nn.Module:
    torch.manual_seed(2)
    covered = None if coverage is None else coverages.parse(coverage)
    site = Site(scores.parse(score), FullSpec(), SoftmaxSpec(), coverage=covered)
    module = SingleHeadSpec().build(site, "cross", WIDTH, DIMS, 0.0).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module


def at(step: int, queries: int = 1) -> Positions:
    return Positions(torch.full((queries,), step), torch.arange(KEYS))


@pytest.mark.parametrize("kind", coverages.kinds())
@pytest.mark.parametrize("score", ["additive", "bilinear"])
def test_the_score_sees_the_coverage_of_the_steps_before(score, kind):
    """The pipeline step by step, with single floats where the score is taken."""
    module = attention(score, kind)
    states, queries = draw(ROWS, KEYS, WIDTH, seed=3), draw(STEPS, ROWS, WIDTH, seed=4)
    memory = module.memorize(states, VALID)
    history, feature = None, states.new_zeros(ROWS, KEYS, module.coverage.width)
    kept = module.coverage.memorize(states.masked_fill(~VALID[..., None], 0.0))
    for step in range(STEPS):
        out = module(queries[step][:, None], memory, at(step), history=history, need_weights=True)
        history = out.history
        wanted = torch.zeros(ROWS, KEYS, dtype=torch.float64)
        for row in range(ROWS):
            for key in range(KEYS):
                wanted[row, key] = plain_score(
                    module.score, score, queries[step, row], states[row, key], feature[row, key]
                )
        weights = wanted.masked_fill(~VALID, -torch.inf).softmax(-1)
        torch.testing.assert_close(out.weights[:, 0, 0], weights)
        feature = module.coverage(feature, weights, queries[step], kept).masked_fill(~VALID[..., None], 0.0)
        torch.testing.assert_close(history.feature, feature)


def plain_score(score: nn.Module, kind: str, query: Tensor, key: Tensor, feature: Tensor) -> Tensor:
    if kind == "bilinear":
        return (score.weight[0] @ query + score.feature_vectors[0] @ feature) @ key
    told = feature @ score.feature_weight[0]
    hidden = query @ score.query_weight[0] + key @ score.key_weight[0] + score.bias[0, 0] + told
    return torch.tanh(hidden) @ score.vector[0]


@pytest.mark.parametrize("kind", coverages.kinds())
def test_hypotheses_side_by_side_have_coverages_of_their_own(kind):
    """Three a source, reordered after the first step, equal three sources of one."""
    module = attention("additive", kind)
    states, queries = draw(ROWS, KEYS, WIDTH, seed=3), draw(2, ROWS, 3, WIDTH, seed=4)
    order = torch.tensor([1, 1, 0, 5, 3, 5])
    memory = module.memorize(states, VALID)
    first = module(queries[0], memory, at(0, 3)).history
    together = module(queries[1], memory, at(1, 3), history=select_batch(first, order)).context.flatten(0, 1)
    repeated = module.memorize(states.repeat_interleave(3, 0), VALID.repeat_interleave(3, 0))
    alone = module(queries[0].flatten(0, 1)[:, None], repeated, at(0)).history
    alone = module(queries[1].flatten(0, 1)[:, None], repeated, at(1), history=select_batch(alone, order))
    torch.testing.assert_close(together, alone.context[:, 0])


def test_a_score_without_a_place_for_it_is_refused():
    site = Site(scores.parse("dot"), FullSpec(), SoftmaxSpec(), coverage=coverages.parse("simple"))
    with pytest.raises(ValueError, match="'dot' has no place for a coverage"):
        SingleHeadSpec().check(site, WIDTH, WIDTH)
