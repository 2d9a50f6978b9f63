"""The compiled transforms give what the same transforms give in torch operations: weights and gradients."""

from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms import _entmax, rowwise
from attnbench.attention.transforms._simplex import vjp
from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import Dims
from attnbench.core import native


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """Not while tests are collected, when one worker would wait for another's compiler."""
    if native.load(rowwise._SOURCE) is None:
        pytest.skip("no C++ compiler: torch operations serve")


TRANSFORMS = {
    "softmax": lambda heads: build_transform("softmax"),
    "topk 1": lambda heads: build_transform("topk", k=1),
    "topk 5": lambda heads: build_transform("topk", k=5),
    "topk 8": lambda heads: build_transform("topk", k=8),
    "topk 12": lambda heads: build_transform("topk", k=12),
    "topk 20": lambda heads: build_transform("topk", k=20),
    "topk_oow 4": lambda heads: build_transform("topk_oow", n=4),
    "sparsemax": lambda heads: build_transform("sparsemax"),
    "entmax15": lambda heads: build_transform("entmax15"),
    "entmax 1.05": lambda heads: build_transform("entmax", alpha=1.05),
    "entmax 1.3": lambda heads: build_transform("entmax", alpha=1.3),
    "entmax 1.9": lambda heads: build_transform("entmax", alpha=1.9),
    "learned": lambda heads: learned(heads),
    "sigmoid": lambda heads: build_transform("sigmoid"),
}


def learned(heads):
    transform = build_transform("entmax", alpha="learned", heads=heads)
    with torch.no_grad():
        transform.raw.copy_(torch.linspace(-3, 2, heads))
    return transform


def answer(transform, scores, upstream, **masks):
    scores = scores.detach().requires_grad_()
    weights = transform(scores, **masks)
    wanted = [scores, *(transform.parameters() if isinstance(transform, torch.nn.Module) else ())]
    return weights.detach(), torch.autograd.grad(weights, wanted, upstream)


def both(name, scores, upstream, **masks):
    """Weights and gradients of the compiled path, then of torch operations."""
    transform = TRANSFORMS[name](scores.shape[-3] if scores.dim() > 2 else 1)
    assert rowwise.serves(scores)
    compiled = answer(transform, scores, upstream, **masks)
    with native.off():
        return compiled, answer(transform, scores, upstream, **masks)


def same(compiled, plain, tolerance):
    torch.testing.assert_close(compiled[0], plain[0], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(compiled[1], plain[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=30 * tolerance, atol=30 * tolerance)


def fused(name, heads):
    kind = {"entmax 1.05": 0.05, "entmax 1.3": 0.3, "entmax 1.9": 0.9}
    if name == "learned":
        return rowwise.Fused("entmax", excess=torch.sigmoid(torch.linspace(-3, 2, heads)).view(-1, 1, 1))
    if name in kind:
        return rowwise.Fused("entmax", excess=kind[name])
    return rowwise.Fused("topk" if name.startswith("topk") else name)


def error(found, exact):
    return float((found.double() - exact).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TRANSFORMS)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_compiled_is_plain(name, dtype, data):
    """Any length on either side of the change from short rows to long ones, any number of rows, any mask."""
    keys = data.draw(st.integers(1, 40) | st.integers(55, 75) | st.integers(120, 200) | st.integers(400, 700), "keys")
    heads, queries, batch = (data.draw(st.integers(1, 5), each) for each in ("heads", "queries", "batch"))
    scale = data.draw(st.sampled_from([0.01, 1.0, 3.0, 30.0]), "scale")
    torch.manual_seed(data.draw(st.integers(0, 2**16), "seed"))
    scores = torch.randn(batch, heads, queries, keys, dtype=dtype) * scale
    if data.draw(st.booleans(), "ties"):
        scores = (scores * 2 / scale).round() * scale / 2
    masks = {}
    shape = data.draw(st.sampled_from([None, (batch, 1, 1, keys), (queries, keys), (heads, 1, 1)]), "valid")
    if shape is not None:
        masks["valid"] = torch.rand(shape) < 0.7
    if name.startswith("topk_oow") and data.draw(st.booleans(), "keep"):
        masks["keep"] = torch.rand(queries, keys) < 0.2
    upstream = torch.randn_like(scores)
    compiled, plain = both(name, scores, upstream, **masks)
    if dtype == torch.float64:
        edge = ((compiled[0] > 0) != (plain[0] > 0)).any(-1, keepdim=True)  # a weight of 7e-18 has a say in gradients
        if edge.any():
            compiled, plain = both(name, scores, upstream.masked_fill(edge, 0.0), **masks)
        same(compiled, plain, 1e-11)
    else:  # at the edge of the support a gradient depends on digits that float32 has not: of one set of weights, then
        with native.off():
            transform = TRANSFORMS[name](heads)
            if isinstance(transform, torch.nn.Module):
                transform.double()
            exact, _ = answer(transform, scores.double(), upstream.double(), **masks)
        assert error(compiled[0], exact) <= 1e-6 + 4 * error(plain[0], exact)
        found = rowwise.vjp(upstream, plain[0], fused(name, heads), to_excess=name == "learned")
        torch.testing.assert_close(found[0], plain[1][0], rtol=3e-5, atol=3e-6)
        if name == "learned":
            rates = torch.sigmoid(torch.linspace(-3, 2, heads)).view(-1, 1, 1)
            raw = (found[1].sum_to_size(rates.shape) * rates * (1 - rates)).flatten()
            torch.testing.assert_close(raw, plain[1][1], rtol=1e-4, atol=1e-4)
    if name.startswith("topk"):
        assert torch.equal(compiled[0] > 1e-37, plain[0] > 1e-37)  # below, torch has numbers that are not normal


FORWARDS = {
    "gates": {"kind": "sigmoid"},
    "index 3": {"kind": "topk", "k": 3, "ties": "index"},
    "index 20": {"kind": "topk", "k": 20, "ties": "index"},
    "index of all": {"kind": "topk", "k": 0, "ties": "index"},
    "a part": {"kind": "topk", "ratio": 0.07},
    "half at least 3": {"kind": "topk", "ratio": 0.5, "at_least": 3},
    "all in parts": {"kind": "topk", "ratio": 1.0},
    "a part by index": {"kind": "topk", "ratio": 0.3, "ties": "index"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORWARDS)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_only_forwards_is_compiled_is_plain(name, dtype, data):
    """Ties, masks, and rows that NaN and infinity spoil or empty."""
    keys = data.draw(st.integers(1, 40) | st.integers(120, 200) | st.integers(400, 700), "keys")
    heads, queries, batch = (data.draw(st.integers(1, 4), each) for each in ("heads", "queries", "batch"))
    torch.manual_seed(data.draw(st.integers(0, 2**16), "seed"))
    scores = torch.randn(batch, heads, queries, keys, dtype=dtype) * data.draw(st.sampled_from([0.1, 3.0, 30.0]))
    if data.draw(st.booleans(), "ties"):
        scores = scores.round()
    for value in data.draw(st.lists(st.sampled_from([torch.nan, torch.inf, -torch.inf]), max_size=3), "odd"):
        scores.view(-1)[torch.randint(scores.numel(), (1,))] = value
    valid = torch.rand(batch, 1, 1, keys) < 0.7 if data.draw(st.booleans(), "valid") else None
    spec = transforms.parse(FORWARDS[name])
    made = spec.build(Dims())
    found = rowwise.weigh(scores, valid, spec.fused(made))
    with native.off():
        plain = made(scores, valid=valid)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.equal(found > 1e-37, plain > 1e-37)  # below, torch has numbers that are not normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gate_that_would_be_shut_is_spoilt_with_its_row(dtype):
    scores = torch.tensor([[torch.inf, -3000.0, -torch.inf], [0.0, -3000.0, -torch.inf]], dtype=dtype)
    found = rowwise.weigh(scores, None, rowwise.Fused("sigmoid"))
    assert found.isnan().tolist() == [[True, True, False], [False] * 3]
    assert found[1].tolist() == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("keys", [60, 127, 191, 700])
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name != "sigmoid"])
def test_weights_of_few_sizes_sum_to_one(name, keys):
    """Where many weights are equal, what each addition rounds off goes the same way."""
    torch.manual_seed(keys)
    scores = (torch.randn(1, 2, 200, keys) * 2).round() * 1.5
    weights = TRANSFORMS[name](2)(scores).detach().double()
    assert error(weights.sum(-1), torch.ones_like(weights[..., 0])) < 1e-6


@pytest.mark.parametrize("excess", [2e-4, 0.03, 0.1, 0.3, 0.48, 0.52, 0.8, 0.97])
@pytest.mark.parametrize("keys", [3, 24, 64, 120, 700])
def test_single_precision_keeps_to_the_definition(excess, keys):
    """Short steps move weights along a series, but for those at the edge of the support; whatever alpha is."""
    torch.manual_seed(keys)
    wide = torch.tensor([excess], dtype=torch.float32).double()
    fused = rowwise.Fused("entmax", excess=wide.float())
    scores = torch.randn(600, keys) * torch.tensor([0.1, 1.0, 3.0, 20.0]).repeat(150)[:, None]
    scores[1::4, : keys // 2] = scores[1::4, :1]
    expected = _entmax.weigh(scores.double(), wide)
    weights = rowwise.weigh(scores, None, fused)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=2e-6)
    upstream = torch.randn_like(scores)
    to_scores, to_alpha = rowwise.vjp(upstream, expected.float(), fused, to_excess=True)
    definition = vjp(upstream.double(), _entmax.slope(expected, wide))
    torch.testing.assert_close(to_scores.double(), definition, rtol=1e-5, atol=5e-6)
    definition = _entmax.alpha_gradient(upstream.double(), expected, wide)
    torch.testing.assert_close(to_alpha.double(), definition, rtol=1e-4, atol=5e-6)


def test_a_row_that_is_solved_waits_for_its_neighbours_as_it_is():
    """With a key exactly at the edge of its support, beside rows whose threshold moves on."""
    raw = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.5, -0.5, 0.0, 2.0])
    for seed in (*range(100), 4299):
        scores = torch.randn(1, 8, 1, 16, generator=torch.Generator().manual_seed(seed)) * 2
        scores[0, 0] = -2.0
        scores[0, 0, 0, 0] = 0.0
        module = build_transform("entmax", alpha="learned", heads=8)
        with torch.no_grad():
            module.raw.copy_(raw)
            weights = module(scores)
        assert weights[0, 0, 0].tolist() == [1.0, *[0.0] * 15]
        torch.testing.assert_close(weights.sum(-1), torch.ones(1, 8, 1))


@pytest.mark.parametrize("content", [float("nan"), float("inf"), -float("inf"), 3e38, -3e38])
@pytest.mark.parametrize("keys", [7, 90])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_spoilt_empty_and_huge_rows(name, keys, content):
    scores = torch.randn(3, 2, 6, keys)
    scores[0, 0, 0, 3] = scores[1, 1, 2, 5] = scores[2, 0, 5, 0] = content
    scores[0, 1, 1] = -torch.inf
    valid = torch.rand(3, 1, 6, keys) < 0.8
    valid[2, 0, 4] = False
    weights, plain = (found[0] for found in both(name, scores, torch.randn_like(scores), valid=valid))
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("keys", [7, 90, 300])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_number_is_left_of_a_spoilt_row_nor_of_its_gradient(name, keys):
    scores, valid = torch.randn(1, 2, 3, keys), torch.arange(keys) != 3
    scores[0, 1, 0, 5] = torch.nan
    weights, (grad, *_) = answer(TRANSFORMS[name](2), scores, torch.randn_like(scores), valid=valid)
    for found in (weights, grad):
        assert torch.equal(found.isnan(), valid & scores.isnan().any(-1, keepdim=True))
        assert not found[..., 3].any()


def test_rows_are_shared_out_among_threads():
    """As many rows as threads share; the answer depends on neither their number nor on where a block ends."""
    scores, upstream = torch.randn(2, 3, 101, 83), torch.randn(2, 3, 101, 83)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([both(name, scores, upstream)[0] for name in TRANSFORMS])
    finally:
        torch.set_num_threads(before)
    for more in found[1:]:
        for one, other in zip(found[0], more, strict=True):
            assert torch.equal(one[0], other[0])
            assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="registers of x86 processors")
@pytest.mark.parametrize(("without", "width"), [("avx512f", 32), ("avx", 16)])
def test_narrower_registers_give_the_same(without, width, monkeypatch):
    """What a processor with registers of 32 or 16 bytes would compile."""
    if without == "avx512f" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("the other tests are of 32 bytes here")
    monkeypatch.setenv("CXX", " ".join([*native._command(), f"-mno-{without}"]))
    torch.manual_seed(0)
    cached = native._load, native.compiler
    for function in cached:
        function.cache_clear()
    try:
        assert native.load(rowwise._SOURCE).attnbench_bytes() == width
        for keys in (1, 5, 33, 64, 65, 100, 131):
            scores, upstream, valid = torch.randn(3, 5, 7, keys), torch.randn(3, 5, 7, keys), torch.rand(7, keys) < 0.7
            for name in TRANSFORMS:
                same(*both(name, scores.double(), upstream.double(), valid=valid), 1e-11)
                compiled, plain = both(name, scores, upstream, valid=valid)
                torch.testing.assert_close(compiled[0], plain[0], rtol=1e-5, atol=1e-5)
                found = rowwise.vjp(upstream, plain[0], fused(name, 5), to_excess=name == "learned")
                torch.testing.assert_close(found[0], plain[1][0], rtol=3e-5, atol=3e-6)
    finally:
        monkeypatch.undo()
        for function in cached:
            function.cache_clear()


@pytest.mark.parametrize("count", [1, 2, 30, 99])
def test_topk_finds_the_kth_among_numbers_far_apart(count):
    """Bisection between numbers of all magnitudes ends at the right one, in both directions of the sign."""
    exponents = torch.linspace(-44, 38, 50)
    scores = torch.cat([10**exponents, -(10**exponents)])[torch.randperm(100)]
    weights = build_transform("topk", k=count)(scores - scores.max())
    kth = (scores - scores.max()).topk(count).values[-1]
    chosen = rowwise.weigh(scores, None, rowwise.Fused("topk", count))
    assert weights.sum() == pytest.approx(1)
    assert bool((chosen[scores < scores.topk(count).values[-1]] == 0).all())
    assert bool((weights[(scores - scores.max()) < kth] == 0).all())


def test_memory_that_is_not_contiguous_is_read_right():
    scores = torch.randn(4, 6, 3, 20).transpose(0, 1)[:, :, :, ::2]
    valid = (torch.rand(20, 3) < 0.7).t()[:, ::2]
    for name in TRANSFORMS:
        compiled, plain = both(name, scores, torch.randn(scores.shape).flip(0), valid=valid)
        same(compiled, plain, 1e-5)


@pytest.mark.parametrize("keys", [9, 90])
def test_an_alpha_that_is_no_number_is_seen(keys):
    transform = learned(3)
    with torch.no_grad():
        transform.raw[1] = float("nan")
    weights = transform(torch.randn(2, 3, 4, keys))
    assert bool(weights[:, 1].isnan().all())
    assert bool(weights[:, ::2].isfinite().all())


def test_a_backward_pass_whose_forward_was_compiled_needs_no_more():
    scores = torch.randn(3, 8, requires_grad=True)
    weights = build_transform("sparsemax")(scores)
    with native.off():
        weights.backward(torch.randn(3, 8))
    assert scores.grad is not None


def test_an_excess_of_another_type_is_read_as_what_it_is():
    scores = torch.randn(3, 8)
    found = rowwise.weigh(scores, None, rowwise.Fused("entmax", excess=torch.tensor([0.5], dtype=torch.float64)))
    torch.testing.assert_close(found, build_transform("entmax15")(scores), rtol=1e-5, atol=1e-6)


def test_an_upstream_gradient_that_is_a_negated_view_is_read_right():
    weights, upstream = rowwise.weigh(torch.randn(3, 8), None, rowwise.Fused("softmax")), torch.randn(3, 8)
    found = rowwise.vjp(torch._neg_view(upstream), weights, rowwise.Fused("softmax"))[0]
    torch.testing.assert_close(found, -rowwise.vjp(upstream, weights, rowwise.Fused("softmax"))[0])
