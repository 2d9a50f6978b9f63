"""The laws of a score transform (attention/transforms/base.py), for every member of the registry.

A new file in attention/transforms is tested here at once: built from its budget where it takes one, else bare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from members import filled
from torch import Tensor, nn

from attnbench.attention.patterns.base import dense
from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.attention.types import Dims, Positions
from attnbench.core.files import dump_yaml, parse_yaml

BATCH, HEADS, QUERIES, KEYS, BUDGET = 2, 3, 5, 8, 4
NAN, INF = float("nan"), float("inf")

VARIANTS: list[dict[str, Any]] = [
    {"kind": "topk", "k": 0},
    {"kind": "topk", "k": 1},
    {"kind": "topk", "k": 3, "ties": "index"},
    {"kind": "topk", "ratio": 0.4, "at_least": 2},
    {"kind": "topk", "ratio": 0.4, "ties": "index"},
    {"kind": "entmax", "alpha": 1},
    {"kind": "entmax", "alpha": 1.0002},
    {"kind": "entmax", "alpha": 1.2},
    {"kind": "entmax", "alpha": 1.8},
    {"kind": "entmax", "alpha": 2.5},
    {"kind": "entmax", "alpha": "learned"},
]
"""Fields that change how a transform computes."""


def _specs() -> list[TransformSpec]:
    plain = []
    for kind in transforms.kinds():
        cls = transforms.get(kind)
        role = sorted(cls.roles)[0]
        plain.append(filled(cls, BUDGET, role))
    return plain + [transforms.parse(raw) for raw in VARIANTS]


def _name(spec: TransformSpec) -> str:
    return "-".join([spec.kind, *(f"{key}={value}" for key, value in spec.canonical().items() if key != "kind")])


@pytest.fixture(params=_specs(), ids=_name)
def spec(request: pytest.FixtureRequest) -> TransformSpec:
    return request.param


class Apply:
    """The transform, with bounds that bind nothing where it needs some, and learned alphas that differ."""

    def __init__(self, spec: TransformSpec, dtype: torch.dtype = torch.float64) -> None:
        self.needs_upper = spec.needs_upper
        self.transform = spec.build(Dims(heads=HEADS, longest_source=KEYS))
        if isinstance(self.transform, nn.Module):
            self.transform.to(dtype)
            with torch.no_grad():
                for parameter in self.transform.parameters():
                    parameter += torch.linspace(-1, 1, parameter.numel(), dtype=dtype).view(parameter.shape)

    def __call__(self, scores: Tensor, valid: Tensor | None = None) -> Tensor:
        upper = torch.full_like(scores, 2) if self.needs_upper else None
        return self.transform(scores, valid=valid, upper=upper)

    def pull(self, scores: Tensor, valid: Tensor | None = None, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights, and the gradient at the scores of a random mix of them."""
        leaf = scores.detach().clone().requires_grad_()
        weights = self(leaf, valid)
        weights.backward(draw(*scores.shape, seed=7).to(scores.dtype) if grad is None else grad)
        assert leaf.grad is not None
        return weights.detach(), leaf.grad


@pytest.fixture
def apply(spec: TransformSpec) -> Apply:
    return Apply(spec)


def draw(*shape: int, seed: int = 0, scale: float = 1.5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def some_scores(keys: int = KEYS, seed: int = 0) -> Tensor:
    return draw(BATCH, HEADS, QUERIES, keys, seed=seed)


def zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


# ---- shape, sum, shift ---------------------------------------------------------------------------------------------


def test_weights_are_shaped_like_the_scores_and_not_negative(apply):
    weights = apply(some_scores())
    assert weights.shape == (BATCH, HEADS, QUERIES, KEYS)
    assert weights.dtype == torch.float64
    assert bool((weights >= 0).all())


def test_rows_sum_to_one(spec, apply):
    if spec.rows != "simplex":
        pytest.skip("gates stand alone")
    close(apply(some_scores()).sum(-1), torch.ones(BATCH, HEADS, QUERIES, dtype=torch.float64))


@pytest.mark.parametrize("keys", [1, 2, 3, 4, 5, 9])
def test_it_is_softmax_where_it_says_so(spec, apply, keys):
    """Else a user is told that a transform changes nothing, which does."""
    if spec.is_softmax(keys):
        scores = some_scores(keys)
        close(apply(scores), scores.softmax(-1))
    if spec.is_softmax():
        assert spec.is_softmax(1000)


@pytest.mark.parametrize("shift", [1.0, -37.5, 1e4])
def test_adding_a_constant_changes_nothing(spec, apply, shift):
    if spec.rows != "simplex":
        pytest.skip("gates are not shift-invariant")
    scores = (some_scores() * 64).round() / 64  # the shift is then exact
    close(apply(scores + shift), apply(scores))


def test_whole_numbers_are_refused(apply):
    with pytest.raises(TypeError, match="floating-point"):
        apply(some_scores().long())


def test_budget_is_kept():
    taken = 0
    for kind in transforms.kinds():
        cls = transforms.get(kind)
        for role in sorted(cls.roles):
            for budget in (1, 3, KEYS, KEYS + 5):
                spec = cls.from_budget(budget, role)
                if spec is not None:
                    taken += 1
                    near = spec.keep(role)
                    rule = None if near is None else near.mask_mod("encoder_self")
                    middle = Positions(torch.tensor([KEYS // 2]), torch.arange(KEYS))  # a row whose window is whole
                    window = {} if rule is None else {"keep": dense(rule, middle)}
                    weights = spec.build(Dims(heads=HEADS))(some_scores(), **window)
                    kept = (weights > 0).sum(-1)
                    assert bool((kept == min(budget, KEYS)).all()), (kind, budget)
    assert taken


def tried(apply: Apply, argument: str, value: Tensor, **others: Tensor) -> Tensor | None:
    """The weights; None where it refuses the argument, by its name."""
    try:
        return apply.transform(some_scores(), valid=None, **{argument: value}, **others)
    except ValueError as error:
        if f"'{argument}'" in str(error):
            return None
        raise


def test_bounds_are_kept_or_refused(apply):
    """Half of them bind, and leave room for the whole of a row."""
    upper = torch.where(torch.arange(KEYS) % 2 == 0, 1.5 / KEYS, 1.0).double().expand_as(some_scores())
    weights = tried(apply, "upper", upper)
    if weights is None:
        assert not apply.needs_upper
        return
    assert bool((weights <= upper + 1e-12).all())
    if apply.needs_upper:
        assert bool((weights[..., ::2] > upper[..., ::2] - 1e-9).any())  # it could have been too much


def test_what_is_to_be_kept_is_kept_or_refused(spec, apply):
    scores = some_scores()
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.argmin(-1, keepdim=True), True)
    weights = tried(apply, "keep", keep, **({"upper": torch.full_like(scores, 2)} if spec.needs_upper else {}))
    brings_its_own = any(spec.keep(role) is not None for role in spec.roles)
    assert (weights is not None and bool((weights[keep] > 0).all())) or (weights is None and not brings_its_own)


# ---- the table of edge cases ----------------------------------------------------------------------------------------


def test_a_row_without_valid_keys_is_empty(apply):
    scores = some_scores()
    valid = torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    valid[0, :, 1] = False
    valid[1, :, 4] = False
    weights, grad = apply.pull(scores, valid)
    for row in (weights[0, :, 1], weights[1, :, 4], grad[0, :, 1], grad[1, :, 4]):
        assert torch.equal(row, zeros_like(row))
    assert weights.isfinite().all()
    assert grad.isfinite().all()
    alive = valid.any(-1, keepdim=True).expand_as(scores)
    whole, whole_grad = apply.pull(scores)
    close(weights[alive], whole[alive])
    close(grad[alive], whole_grad[alive])


def test_no_valid_key_anywhere(apply):
    weights, grad = apply.pull(some_scores(), torch.zeros(KEYS, dtype=torch.bool))
    assert torch.equal(weights, zeros_like(weights))
    assert torch.equal(grad, zeros_like(grad))
    for parameter in apply.transform.parameters() if isinstance(apply.transform, nn.Module) else ():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("content", [NAN, INF, -INF, 1e30, -3e38])
@pytest.mark.parametrize("upstream", [NAN, INF, 2.0])
def test_a_masked_key_is_nothing_whatever_it_holds(apply, content, upstream):
    """As if the masked keys were not there: also when the value behind them, and so the gradient, is NaN."""
    valid = torch.tensor([True, False, True, True, True, False, True, True])
    scores, grad = some_scores(), draw(BATCH, HEADS, QUERIES, KEYS, seed=3)
    without, without_grad = apply.pull(scores[..., valid], grad=grad[..., valid])
    scores[..., ~valid], grad[..., ~valid] = content, upstream
    weights, found = apply.pull(scores, valid, grad)
    assert torch.equal(weights[..., ~valid], torch.zeros(BATCH, HEADS, QUERIES, 2, dtype=torch.float64))
    assert torch.equal(found[..., ~valid], torch.zeros(BATCH, HEADS, QUERIES, 2, dtype=torch.float64))
    close(weights[..., valid], without, 1e-10)
    close(found[..., valid], without_grad, 1e-10)


def test_one_valid_key_gets_all(spec, apply):
    if spec.rows != "simplex":
        pytest.skip("gates stand alone")
    valid = torch.zeros(KEYS, dtype=torch.bool)
    valid[3] = True
    weights, grad = apply.pull(some_scores(), valid)
    assert torch.equal(weights, valid.to(weights.dtype).expand_as(weights))
    assert torch.equal(grad, zeros_like(grad))
    weights, grad = apply.pull(some_scores(keys=1))
    assert torch.equal(weights, torch.ones_like(weights))
    assert torch.equal(grad, zeros_like(grad))


def test_minus_infinity_is_a_mask(apply):
    scores = some_scores()
    valid = draw(BATCH, HEADS, QUERIES, KEYS, seed=5) > -0.5
    valid[0, 0, 0] = False  # and a row of nothing but -inf
    by_mask, by_mask_grad = apply.pull(scores, valid)
    by_score, by_score_grad = apply.pull(scores.masked_fill(~valid, -INF))
    assert torch.equal(by_score, by_mask)
    assert torch.equal(by_score_grad, by_mask_grad)
    assert by_score_grad.isfinite().all()
    assert torch.equal(by_score[~valid], zeros_like(by_score[~valid]))


@pytest.mark.parametrize("content", [NAN, INF])
def test_a_valid_nan_or_infinity_spoils_its_row_alone(apply, content):
    scores = some_scores()
    valid = torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    valid[1, :, 2, 6] = False
    wanted, wanted_grad = apply.pull(scores, valid)
    scores[1, 0, 2, 3] = content
    scores[1, 0, 2, 4] = torch.finfo(scores.dtype).min  # with which some fill what they mask
    scores[1, 0, 2, 5] = -INF
    weights, grad = apply.pull(scores, valid)
    row, row_grad = weights[1, 0, 2], grad[1, 0, 2]
    dead = torch.tensor([False, False, False, False, False, True, True, False])
    assert row[~dead].isnan().all()
    assert not row_grad[~dead].isfinite().any()
    for part in (row[dead], row_grad[dead]):
        assert torch.equal(part, zeros_like(part))
    others = torch.ones(BATCH, HEADS, QUERIES, dtype=torch.bool)
    others[1, 0, 2] = False
    close(weights[others], wanted[others])
    close(grad[others], wanted_grad[others])


def test_a_nan_gradient_at_a_valid_key_is_not_hidden(apply):
    grad = draw(BATCH, HEADS, QUERIES, KEYS, seed=3)
    best = some_scores().argmax(-1, keepdim=True)
    grad.scatter_(-1, best, NAN)
    _, found = apply.pull(some_scores(), grad=grad)
    assert not found.gather(-1, best).isfinite().any()


@pytest.mark.parametrize("keys", [2, 30, 2048])
def test_huge_scores_in_float32(spec, keys):
    if spec.rows != "simplex":
        pytest.skip("gates stand alone")
    apply = Apply(spec, torch.float32)
    for scores in (some_scores(keys) * 1e4, some_scores(keys) + 1e4, torch.full((1, HEADS, 1, keys), -1e4)):
        weights, grad = apply.pull(scores.float())
        assert weights.isfinite().all()
        assert grad.isfinite().all()
        close(weights.sum(-1), torch.ones(weights.shape[:-1]), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(spec, dtype):
    apply = Apply(spec, torch.float32)
    scores = some_scores().to(dtype)
    valid = torch.arange(KEYS) < 6
    scores[..., 7] = NAN
    grad = draw(*scores.shape, seed=7).to(dtype)
    weights, found = apply.pull(scores, valid, grad)
    wide, wide_found = apply.pull(scores.float(), valid, grad.float())
    assert weights.dtype == found.dtype == dtype
    assert torch.equal(weights, wide.to(dtype))
    assert torch.equal(found, wide_found.to(dtype))


def test_float32_is_close_to_float64(spec):
    narrow, wide = Apply(spec, torch.float32), Apply(spec)
    scores = some_scores().float()
    tolerance = 1e-3 if getattr(spec, "alpha", 1) == 2.5 else 1e-5  # steep at the threshold
    found, wanted = narrow.pull(scores), wide.pull(scores.double())
    close(found[0].double(), wanted[0], tolerance)
    close(found[1].double(), wanted[1], 30 * tolerance)


@pytest.mark.parametrize("shape", [(BATCH, HEADS, 0, KEYS), (BATCH, HEADS, QUERIES, 0), (0, HEADS, QUERIES, KEYS)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nothing_in_nothing_out(spec, shape, dtype):
    apply = Apply(spec, torch.float32)
    scores = torch.zeros(shape, dtype=dtype)
    for valid in (None, torch.ones(shape, dtype=torch.bool)):
        weights, grad = apply.pull(scores, valid)
        assert weights.shape == grad.shape == shape
        assert weights.dtype == dtype
    assert (apply(scores) @ torch.zeros(*shape[:-2], shape[-1], 4, dtype=dtype)).shape == (*shape[:-1], 4)


@pytest.mark.parametrize("shape", [
    (BATCH, 1, 1, KEYS), (1, 1, QUERIES, KEYS), (QUERIES, KEYS), (KEYS,), (BATCH, HEADS, QUERIES, KEYS),
    (BATCH, 1, QUERIES, 1),
])  # fmt: skip
def test_masks_broadcast(apply, shape):
    valid = draw(*shape, seed=11) > -0.3
    short, short_grad = apply.pull(some_scores(), valid)
    full, full_grad = apply.pull(some_scores(), valid.expand(BATCH, HEADS, QUERIES, KEYS).contiguous())
    assert torch.equal(short, full)
    assert torch.equal(short_grad, full_grad)
    assert not bool(short.masked_select(~valid.expand_as(short)).any())


def test_padding_changes_nothing(apply):
    scores, grad = some_scores(), draw(BATCH, HEADS, QUERIES, KEYS, seed=3)
    wanted, wanted_grad = apply.pull(scores, grad=grad)
    for extra in (1, 9, 300):
        junk = draw(BATCH, HEADS, QUERIES, extra, seed=extra, scale=50)
        valid = torch.arange(KEYS + extra) < KEYS
        found, found_grad = apply.pull(torch.cat([scores, junk], -1), valid, torch.cat([grad, junk], -1))
        close(found[..., :KEYS], wanted, 1e-10)
        close(found_grad[..., :KEYS], wanted_grad, 1e-10)


def test_rows_do_not_see_one_another(apply):
    """Batch composition and the number of queries change nothing."""
    scores = some_scores()
    wanted = apply(scores)
    close(apply(scores[1:]), wanted[1:], 1e-12)
    close(apply(scores[:, :, 2:3]), wanted[:, :, 2:3], 1e-12)


def test_inputs_are_left_alone_and_may_be_strided(apply):
    scores = some_scores()
    valid = draw(BATCH, 1, QUERIES, KEYS, seed=5) > -1
    wanted, wanted_grad = apply.pull(scores, valid)
    strided = scores.transpose(-1, -2).contiguous().transpose(-1, -2)
    upstream = draw(*scores.shape, seed=7).permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    before, mask_before, upstream_before = strided.clone(), valid.clone(), upstream.clone()
    leaf = strided.requires_grad_()
    weights = apply(leaf, valid)
    weights.backward(upstream)
    close(weights, wanted)
    assert leaf.grad is not None
    close(leaf.grad, wanted_grad)
    assert torch.equal(leaf, before)
    assert torch.equal(valid, mask_before)
    assert torch.equal(upstream, upstream_before)


# ---- derivatives, autograd, tools ------------------------------------------------------------------------------------


def away_from_kinks(function: Callable[[Tensor], Tensor], scores: Tensor) -> bool:
    """No score moved by 1e-4 changes a support."""
    support = function(scores) > 0
    for index in range(scores.shape[-1]):
        for step in (1e-4, -1e-4):
            moved = scores.clone()
            moved[..., index] += step
            if not torch.equal(function(moved) > 0, support):
                return False
    return True


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_equal_finite_differences(apply, masked):
    valid = torch.tensor([True, True, False, True, True]) if masked else None
    checked = 0
    for seed in range(12):
        scores = draw(1, HEADS, 1, 5, seed=seed, scale=1.0)
        if away_from_kinks(lambda z: apply(z, valid), scores):
            scores.requires_grad_()
            parameters = tuple(apply.transform.parameters()) if isinstance(apply.transform, nn.Module) else ()
            assert torch.autograd.gradcheck(lambda z, *_: apply(z, valid), (scores, *parameters), atol=1e-7, rtol=1e-4)
            checked += 1
        if checked == 2:
            return
    pytest.fail("too few rows away from kinks to say anything")


def test_anomaly_detection_finds_nothing_in_empty_rows(apply):
    """No NaN is made on the way and masked after."""
    valid = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    valid[2] = False
    with torch.autograd.set_detect_anomaly(True):
        weights, grad = apply.pull(some_scores(), valid)
    assert weights.isfinite().all()
    assert grad.isfinite().all()


def test_autocast_changes_nothing(spec):
    apply = Apply(spec, torch.float32)
    scores = some_scores().float()
    wanted = apply.pull(scores)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = apply.pull(scores)
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_without_gradients_the_weights_are_the_same(apply):
    scores = some_scores()
    wanted, _ = apply.pull(scores)
    with torch.no_grad():
        assert torch.equal(apply(scores), wanted)
    with torch.inference_mode():
        assert torch.equal(apply(scores), wanted)


@pytest.mark.parametrize("given", [{"k": 3}, {"ratio": 0.3}], ids=["k", "ratio"])  # one kind: tracing takes seconds
def test_compiled_agrees_with_eager(given):
    """In one graph, with sizes of scores that are symbols beside those of a mask that are numbers."""
    function = transforms.parse({"kind": "topk", **given}).build(Dims())
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    valid = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(2)
    valid[3] = False
    results = []
    for call in (function, compiled):
        scores = some_scores().float()
        scores[0, 0, :, 7] = NAN
        scores.requires_grad_()
        torch._dynamo.maybe_mark_dynamic(scores, (0, 1, 2, 3))
        weights = call(scores, valid=valid)
        weights.square().sum().backward()
        assert scores.grad is not None
        results.append((weights.detach(), scores.grad))
    close(results[1][0], results[0][0], 1e-6)
    close(results[1][1], results[0][1], 1e-6)


def test_spec_survives_yaml(spec):
    raw, _ = parse_yaml(dump_yaml(spec.dump()))
    again = transforms.parse(raw)
    assert again == spec
    assert again.digest() == spec.digest()
    spec.require()


def test_spec_names_its_paper(spec):
    assert spec.paper
    assert (type(spec).__doc__ or "").strip()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_row_gives_a_distribution_over_valid_keys(data):
    """Scores of every size, ties, infinities and masks: weights are finite, at valid keys only, and sum to 1."""
    spec = data.draw(st.sampled_from(_specs()))
    length = data.draw(st.integers(1, 9))
    values = st.one_of(st.floats(-5, 5), st.floats(-1e4, 1e4), st.sampled_from([0.0, 1.0, -1.0, 1e30, -1e30, -INF]))
    row = data.draw(st.lists(values, min_size=length, max_size=length))
    mask = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    scores = torch.tensor(row, dtype=torch.float32).expand(1, HEADS, 1, length)
    valid = torch.tensor(mask)
    weights, grad = Apply(spec, torch.float32).pull(scores, valid)
    alive = valid & (scores > -INF)
    assert weights.isfinite().all()
    assert grad.isfinite().all()
    assert torch.equal(weights[~alive], torch.zeros(int((~alive).sum())))
    assert torch.equal(grad[~alive], torch.zeros(int((~alive).sum())))
    if spec.rows == "simplex":
        close(weights.sum(-1), alive.any(-1).float(), 1e-5)
        best = scores.masked_fill(~alive, -INF).amax(-1, keepdim=True)
        largest = weights.amax(-1, keepdim=True).expand_as(weights)
        assert bool((~alive | (scores < best) | (weights >= largest - 1e-6)).any(-1).all())
