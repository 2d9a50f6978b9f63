"""Additive scores against numpy, written as the paper has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnbench.attention.scores import _additive, additive
from attnbench.attention.scores.additive import Additive
from attnbench.attention.scores.base import scores
from attnbench.attention.types import Dims
from attnbench.core import native
from attnbench.core.gathered import gathered

BATCH, QUERIES, KEYS, QUERY_WIDTH, KEY_WIDTH = 2, 4, 6, 3, 5


def build(heads: int, units: int | None) -> Additive:
    torch.manual_seed(1)
    score = scores.parse({"kind": "additive", "units": units}).build(
        Dims(heads=heads, query_width=QUERY_WIDTH, key_width=KEY_WIDTH)
    )
    assert isinstance(score, Additive)
    torch.nn.init.normal_(score.bias)
    return score.double()


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("units", [None, 1, 7])
@torch.no_grad()
def test_equals_the_formula(heads, units):
    """Bahdanau et al. 2015, A.1.2: `a(s, h) = v . tanh(W s + U h)`, here with a bias."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(BATCH, heads, QUERIES, QUERY_WIDTH))
    states = rng.normal(size=(BATCH, heads, KEYS, KEY_WIDTH))
    score = build(heads, units)
    keys = score.keys(torch.from_numpy(states))
    found = score(torch.from_numpy(query), keys).numpy()
    assert keys.shape == (BATCH, heads, KEYS, units or QUERY_WIDTH)
    for b, h, i, j in np.ndindex(found.shape):
        query_part = query[b, h, i] @ score.query_weight[h].numpy()
        key_part = states[b, h, j] @ score.key_weight[h].numpy()
        hidden = np.tanh(query_part + key_part + score.bias[h, 0].numpy())
        assert found[b, h, i, j] == pytest.approx(hidden @ score.vector[h].numpy(), abs=1e-12)


@pytest.mark.parametrize(("units", "width"), [(None, QUERY_WIDTH), (9, 9)])
def test_units_are_the_querys_width_where_not_given(units, width):
    score = build(2, units)
    assert score.key_width == width
    assert {name: tuple(parameter.shape) for name, parameter in score.named_parameters()} == {
        "query_weight": (2, QUERY_WIDTH, width),
        "key_weight": (2, KEY_WIDTH, width),
        "bias": (2, 1, width),
        "vector": (2, width),
    }


@pytest.mark.parametrize("units", [0, -1, 2.5])
def test_units_are_a_count(units):
    with pytest.raises(ValueError, match="units"):
        scores.parse({"kind": "additive", "units": units})


def test_inputs_are_left_alone():
    """tanh is taken in place, of a sum that is its own."""
    score = build(1, 4)
    query = torch.randn(BATCH, 1, 1, QUERY_WIDTH, dtype=torch.float64)
    keys = score.keys(torch.randn(BATCH, 1, KEYS, KEY_WIDTH, dtype=torch.float64)).detach()
    before = query.clone(), keys.clone()
    score(query, keys)
    assert torch.equal(query, before[0])
    assert torch.equal(keys, before[1])


def test_initial_weights():
    torch.manual_seed(0)
    score = scores.parse({"kind": "additive", "units": 64}).build(Dims(heads=2, query_width=32, key_width=96))
    assert isinstance(score, Additive)
    for weight, width in ((score.query_weight, 32), (score.key_weight, 96)):
        bound = (6 / (width + 64)) ** 0.5  # of one head's matrix, not of all
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert score.vector.abs().max() <= 64**-0.5
    assert score.vector.std().item() == pytest.approx(64**-0.5 / 3**0.5, rel=0.2)
    assert not score.bias.any()


@pytest.mark.parametrize("block", [1, 50, 3 * KEYS * 7])
@pytest.mark.parametrize("heads", [1, 2])
def test_blocks_of_queries_change_nothing(monkeypatch, block, heads):
    """Values and gradients, one query a block, several, and a last block that is shorter."""
    score, found = build(heads, 7), []
    for most in (1 << 26, block):
        monkeypatch.setattr(additive, "BLOCK", most)
        leaves = [
            torch.randn(BATCH, heads, number, width, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
            .requires_grad_() for number, width in ((QUERIES, QUERY_WIDTH), (KEYS, KEY_WIDTH))
        ]  # fmt: skip
        result = score(leaves[0], score.keys(leaves[1]))
        found.append([result, *torch.autograd.grad(result.square().sum(), [*leaves, *score.parameters()])])
        with torch.no_grad():
            assert torch.equal(score(leaves[0], score.keys(leaves[1])), result)
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def _compiled() -> None:
    if native.load(_additive._SOURCE) is None:
        pytest.skip("no C++ compiler: torch operations serve")


compiled = pytest.mark.usefixtures("_compiled")


def states(queries: int, keys: int, units: int, heads: int = 2) -> list[torch.Tensor]:
    """Queries, keys and vectors of any size, 0 and large ones among them."""
    torch.manual_seed(queries + keys + units)
    shapes = (BATCH, heads, queries, units), (BATCH, heads, keys, units), (heads, units)
    made = [torch.randn(shape) * 10 ** torch.randint(-4, 2, shape).float() for shape in shapes]
    made[0][0, 0, 0], made[1][0, 0, 0] = 0.0, 0.0
    return [each.requires_grad_() for each in made]


@compiled
@pytest.mark.parametrize("units", [1, 7, 16, 63, 64, 65, 200])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (5, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_is_plain_in_values_and_gradients(units, queries, keys, threads):
    given = states(queries, keys, units)
    exact = [each.detach().double().requires_grad_() for each in given]
    upstream = torch.randn(BATCH, 2, queries, keys)
    upstream[:, :, :, ::2] = 0  # of keys without a weight
    torch.set_num_threads(threads)
    try:
        assert _additive.serves(*given)
        found = _additive.units(*given)
        slopes = torch.autograd.grad(found, given, upstream)
    finally:
        torch.set_num_threads(1)
    wanted = additive._units(*exact)
    assert (found - wanted).abs().max() < 4e-7 * given[2].abs().sum(-1).max()
    for mine, theirs in zip(slopes, torch.autograd.grad(wanted, exact, upstream.double()), strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@compiled
def test_a_unit_is_a_tangent_to_a_few_last_digits():
    x = torch.cat([torch.linspace(-12, 12, 40_001), torch.logspace(-30, 2, 40_001), torch.tensor([torch.inf])])
    x = torch.cat([x, -x])
    found = _additive.units(x.view(1, 1, -1, 1), torch.zeros(1, 1, 1, 1), torch.ones(1, 1)).flatten()
    torch.testing.assert_close(found.double(), x.double().tanh(), rtol=4e-7, atol=0)


@compiled
def test_what_is_no_number_spoils_its_own_key_alone():
    queries, keys, vector = states(3, 4, 20)
    with torch.no_grad():
        keys[0, 1, 2, 5] = torch.nan
    found = _additive.units(queries, keys, vector)
    assert found.isnan().nonzero().tolist() == [[0, 1, query, 2] for query in range(3)]
    upstream = torch.ones_like(found)
    upstream[..., 2] = 0  # masked, it has no say in gradients
    for each in torch.autograd.grad(found, (queries, keys, vector), upstream):
        assert each.isfinite().all()


@compiled
def test_the_module_goes_through_compiled_code_where_it_can(monkeypatch):
    score, calls = build(2, 5).float(), []
    made = _additive.units
    monkeypatch.setattr(_additive, "units", lambda *given: calls.append(1) or made(*given))
    query, keys = torch.randn(BATCH, 2, 3, QUERY_WIDTH), torch.randn(BATCH, 2, 4, KEY_WIDTH)
    found = score(query, score.keys(keys))
    assert len(calls) == 1
    with native.off():
        torch.testing.assert_close(score(query, score.keys(keys)), found, rtol=1e-5, atol=1e-5)
    score.double()(query.double(), score.keys(keys.double()))
    torch.func.vmap(lambda each: torch.func.functional_call(score.float(), {}, (each, score.keys(keys))))(query[None])
    assert len(calls) == 1


@compiled
@torch.no_grad()
def test_what_broadcasts_or_does_not_fit_is_left_to_torch_operations():
    queries, keys, vector = (each.detach() for each in states(3, 4, 16))
    for given in ((queries, keys[:1], vector), (queries[:1], keys, vector), (queries, keys[:, :1], vector)):
        assert not _additive.serves(*given)
    for given in ((queries, keys[..., :8], vector), (queries, keys, vector[:1]), (queries, keys, vector[:, :8])):
        assert not _additive.serves(*given)
    score = build(2, 5).float()
    query, keys = torch.randn(BATCH, 2, 3, QUERY_WIDTH), score.keys(torch.randn(1, 2, 4, KEY_WIDTH))
    torch.testing.assert_close(score(query, keys), score(query, keys.expand(BATCH, -1, -1, -1)))
    with pytest.raises(RuntimeError):
        score(query, score.keys(torch.randn(BATCH + 1, 2, 4, KEY_WIDTH)))


@compiled
def test_a_score_is_compiled_by_torch_in_one_piece():
    score = build(2, 5).float()
    query, keys = torch.randn(BATCH, 2, 3, QUERY_WIDTH), torch.randn(BATCH, 2, 4, 5)
    whole = torch.compile(score, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(query, keys), score(query, keys), rtol=1e-5, atol=1e-5)


@compiled
def test_in_a_loop_the_gradient_of_the_keys_is_one_sum():
    torch.manual_seed(0)
    queries, keys, vector = (torch.randn(shape).requires_grad_() for shape in ((5, 2, 1, 1, 6), (2, 1, 4, 6), (1, 6)))
    read, arrived = gathered(keys), []
    read.register_hook(arrived.append)
    found = torch.stack([_additive.units(query, read, vector) for query in queries])
    wanted = torch.stack([additive._units(query, keys, vector) for query in queries])
    upstream = torch.randn_like(wanted)
    slopes = (torch.autograd.grad(each, (queries, keys, vector), upstream) for each in (found, wanted))
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert arrived == [None]  # steps give autograd nothing as large as the keys


@compiled
def test_there_is_no_second_derivative():
    given = states(2, 3, 4)
    with pytest.raises(RuntimeError, match="Units has no second derivative"):
        torch.autograd.grad(_additive.units(*given).square().sum(), given, create_graph=True)
