"""The Triton kernels of rows give what torch operations give, as Triton's interpreter runs them.

With TRITON_INTERPRET=0 the same tests run on the GPU itself.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms import _rows_gpu
from attnbench.attention.transforms.base import Fused
from attnbench.core import native
from attnbench.core.kernels import installed, interpreted

pytestmark = [
    pytest.mark.skipif(not installed(), reason="Triton is not installed"),
    pytest.mark.skipif(
        not interpreted() and not torch.cuda.is_available(), reason="TRITON_INTERPRET is off and there is no GPU"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, for what is divided by 0 and not looked at
]
DEVICE = "cpu" if interpreted() else "cuda"
NAN, INF = float("nan"), float("inf")
HEADS = 3
ALPHAS = torch.sigmoid(torch.linspace(-3, 2, HEADS))


def learned():
    transform = build_transform("entmax", alpha="learned", heads=HEADS)
    with torch.no_grad():
        transform.raw.copy_(torch.linspace(-3, 2, HEADS))
    return transform


TRANSFORMS = {
    "softmax": (Fused("softmax"), lambda: build_transform("softmax")),
    "topk, k = 1": (Fused("topk", 1), lambda: build_transform("topk", k=1)),
    "topk, k = 5": (Fused("topk", 5), lambda: build_transform("topk", k=5)),
    "topk, k = 40": (Fused("topk", 40), lambda: build_transform("topk", k=40)),
    "sparsemax": (Fused("sparsemax"), lambda: build_transform("sparsemax")),
    "entmax15": (Fused("entmax15"), lambda: build_transform("entmax15")),
    "entmax, alpha = 1.05": (Fused("entmax", excess=0.05), lambda: build_transform("entmax", alpha=1.05)),
    "entmax, alpha = 1.3": (Fused("entmax", excess=0.3), lambda: build_transform("entmax", alpha=1.3)),
    "entmax, alpha = 1.9": (Fused("entmax", excess=0.9), lambda: build_transform("entmax", alpha=1.9)),
    "entmax, learned": (Fused("entmax", excess=ALPHAS.view(-1, 1, 1)), learned),
}
EACH = pytest.mark.parametrize("name", TRANSFORMS)


@pytest.mark.parametrize(("name", "excess"), [("sparsemax", 1.0), ("entmax15", 0.5), ("entmax, alpha = 1.9", 0.9)])
def test_keys_that_hardly_reach_the_threshold_weigh_hardly_anything(name, excess, hardly_reaching):
    kernel, transform = TRANSFORMS[name]
    scores = hardly_reaching(1000, excess)
    found = _rows_gpu.weigh(there(scores), None, kernel).cpu()
    torch.testing.assert_close(found.double(), transform()(scores.double()), rtol=0, atol=3e-6)


def drawn(*shape, scale=1.5, seed=0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def there(given):
    return given.to(DEVICE) if isinstance(given, torch.Tensor) else given


def by_kernels(fused, scores, upstream, valid=None):
    moved = Fused(fused.kind, fused.k, there(fused.keep), there(fused.excess))
    weights = _rows_gpu.weigh(there(scores), there(valid), moved)
    learns = isinstance(fused.excess, torch.Tensor)
    slope, alphas = _rows_gpu.vjp(there(upstream), weights, moved, to_excess=learns)
    return [each.cpu() for each in (weights, slope, alphas) if each is not None]


def as_defined(transform, scores, upstream, **masks):
    scores = scores.detach().double().requires_grad_()
    if isinstance(transform, torch.nn.Module):
        transform = transform.double()
    with native.off():
        weights = transform(scores, **masks)
        (slope,) = torch.autograd.grad(weights, [scores], upstream.double())
    return weights.detach(), slope


def same(found, wanted, tolerance=2e-6):
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=20 * tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e3 * tolerance, atol=50 * tolerance, equal_nan=True)


@EACH
@pytest.mark.parametrize("shape", [(2, HEADS, 5, 8), (1, HEADS, 3, 33), (1, HEADS, 1, 200), (2, HEADS, 150, 3)])
def test_weights_and_gradients_are_those_of_the_definition(name: str, shape: tuple[int, ...]):
    fused, transform = TRANSFORMS[name]
    scores, upstream = drawn(*shape), drawn(*shape, seed=1)
    same(by_kernels(fused, scores, upstream), as_defined(transform(), scores, upstream))


@EACH
@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (1, HEADS, 5, 9), (9,), (2, HEADS, 5, 9)])
def test_masks_of_any_shape_are_heeded_and_hide_what_they_hide(name: str, shape: tuple[int, ...]):
    fused, transform = TRANSFORMS[name]
    scores, upstream = drawn(2, HEADS, 5, 9), drawn(2, HEADS, 5, 9, seed=1)
    valid = drawn(*shape, seed=2) > -0.5
    hidden = ~valid.expand(scores.shape)
    scores[hidden] = drawn(int(hidden.sum()), seed=3).masked_fill_(drawn(int(hidden.sum()), seed=4) > 0, NAN)
    upstream[hidden] = NAN
    found = by_kernels(fused, scores, upstream, valid)
    clean = upstream.masked_fill(hidden, 0.0)
    same(found, as_defined(transform(), scores, clean, valid=valid))
    for each in found[:2]:
        assert not each[hidden].any()


@EACH
def test_rows_without_a_key_are_zeros_and_strange_rows_spoil_no_other(name: str):
    fused, transform = TRANSFORMS[name]
    scores, upstream = drawn(1, HEADS, 6, 9), drawn(1, HEADS, 6, 9, seed=1)
    valid = torch.ones_like(scores, dtype=torch.bool)
    valid[:, :, 0] = False
    scores[:, :, 1] = -INF
    scores[:, :, 2, 4], scores[:, :, 3, 0] = NAN, INF
    scores[:, :, 4, 2:] = -INF
    found = by_kernels(fused, scores, upstream, valid)
    same(found, as_defined(transform(), scores, upstream, valid=valid))
    assert not found[0][:, :, :2].any()
    assert found[0][:, :, 2:4].isnan().all()
    assert found[0][:, :, 4:].isfinite().all()


@EACH
def test_ties(name: str):
    fused, transform = TRANSFORMS[name]
    scores = torch.tensor([[0.0, -0.0, 0.0, 0.0], [2.0, 1.0, 1.0, 1.0], [1e8, 1.0, 1.5, 1.25]]).expand(1, HEADS, 3, 4)
    upstream = drawn(1, HEADS, 3, 4)
    same(by_kernels(fused, scores, upstream), as_defined(transform(), scores, upstream))


@pytest.mark.parametrize("k", [1, 2, 6])
def test_of_top_k_out_of_window_what_is_kept_is_kept(k: int):
    scores, upstream = drawn(2, HEADS, 7, 9), drawn(2, HEADS, 7, 9, seed=1)
    keep, valid = drawn(1, 1, 7, 9, seed=2) > 0.5, drawn(2, 1, 1, 9, seed=3) > -1
    transform = build_transform("topk_oow", n=2 * k)
    fused = Fused("topk", k, keep)
    same(by_kernels(fused, scores, upstream, valid), as_defined(transform, scores, upstream, valid=valid, keep=keep))


def test_gradients_for_alpha_are_those_of_the_definition():
    scores, upstream = drawn(2, HEADS, 5, 20), drawn(2, HEADS, 5, 20, seed=1)
    valid = drawn(2, 1, 1, 20, seed=2) > -1
    fused, transform = TRANSFORMS["entmax, learned"]
    alphas = by_kernels(fused, scores, upstream, valid)[2]
    defined = transform().double()
    with native.off():
        (slope,) = torch.autograd.grad(defined(scores.double(), valid=valid), [defined.raw], upstream.double())
    slope = slope / (ALPHAS * (1 - ALPHAS))  # of the sigmoid, which is outside
    torch.testing.assert_close(alphas.double().sum((0, 2, 3)), slope, rtol=1e-4, atol=1e-5)


def test_alphas_that_are_next_to_one_are_softmax():
    scores = drawn(1, HEADS, 4, 9)
    upstream = drawn(1, HEADS, 4, 9, seed=1)
    fused = Fused("entmax", excess=torch.tensor([0.0, 1e-7, 9e-5]).view(-1, 1, 1))
    found = by_kernels(fused, scores, upstream)
    same(found, as_defined(build_transform("softmax"), scores, upstream), 1e-5)
    assert found[2].isfinite().all()


@pytest.mark.parametrize("above", [3e-4, 1e-3, 3e-3, 1e-2])
@pytest.mark.parametrize(("kind", "excess"), [("entmax15", 0.0), ("entmax", 0.49), ("entmax", 0.3)])
def test_many_keys_that_tie_next_to_the_threshold_do_not_end_the_search_early(kind, excess, above):
    """Newton's steps only halve there, so that a small one says little of what is left."""
    e = excess or 0.5
    scores = torch.full((1, 8192), above - 1 / e)
    scores[0, 0] = 0
    weights = _rows_gpu.weigh(there(scores), None, Fused(kind, excess=excess)).cpu().double()
    wide, low, high = scores.double(), torch.zeros(1, 1).double(), torch.full((1, 1), 40.0).double()
    for _ in range(100):
        middle = (low + high) / 2
        many = (1 + e * (wide - middle)).clamp(min=0).pow(1 / e).sum() > 1
        low, high = torch.where(many, middle, low), torch.where(many, high, middle)
    wanted = (1 + e * (wide - low)).clamp(min=0).pow(1 / e)
    torch.testing.assert_close(weights, wanted / wanted.sum(), rtol=0, atol=4e-6)
    up = torch.sin(1.7 * torch.arange(8192.0)).double()[None]

    def slope(given):
        part = given ** (1 - e)
        return part * (up - (part * up).sum() / part.sum())

    assert float((slope(weights) - slope(wanted / wanted.sum())).abs().max() / slope(wanted).abs().max()) < 3e-3


@EACH
@settings(max_examples=15)
@given(
    keys=st.integers(1, 40), scale=st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]), offset=st.sampled_from([0.0, -80.0]),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_rows_sum_to_one_whatever_they_hold(name: str, keys: int, scale: float, offset: float, seed: int):
    fused, _ = TRANSFORMS[name]
    scores = drawn(1, HEADS, 4, keys, scale=scale, seed=seed) + offset
    weights, slope, *_ = by_kernels(fused, scores, torch.ones_like(scores))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, HEADS, 4), rtol=1e-5, atol=0)
    assert (weights >= 0).all()
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-4)  # moving all scores moves nothing


@pytest.mark.skipif(interpreted(), reason="kernels are interpreted (TRITON_INTERPRET=0 compiles them)")
@EACH
def test_transforms_on_a_gpu_are_made_by_kernels_and_wait_for_nothing(name: str):
    _, build = TRANSFORMS[name]
    transform = build()
    transform = transform.cuda() if isinstance(transform, torch.nn.Module) else transform
    scores = drawn(2, HEADS, 64, 64).cuda().requires_grad_()
    assert _rows_gpu.serves(scores)
    transform(scores).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        transform(scores).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_negated_views_are_read_as_what_they_are():
    scores = there(drawn(2, 3, 4, 9))
    found, wanted = (_rows_gpu.weigh(negate(scores), None, Fused("softmax")) for negate in (torch._neg_view, torch.neg))
    assert torch.equal(found, wanted)
