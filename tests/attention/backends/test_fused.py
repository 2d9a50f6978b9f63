"""The Triton kernels equal the definition, as Triton's interpreter runs them.

With TRITON_INTERPRET=0 the same tests run on the GPU itself.
"""

from __future__ import annotations

import fused_laws as laws
import pytest
import torch
from fused_laws import (
    DEVICE,
    TRANSFORMS,
    Watched,
    allowed,
    both,
    close,
    defined,
    drawing,
    given,
    products_of_equal_keys_are_equal,
)
from torch import nn

from attnbench.attention.backends import fused
from attnbench.attention.backends.base import choose
from attnbench.attention.catalog import build_transform
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import patterns
from attnbench.attention.scores.base import scores
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import Fused, transforms
from attnbench.attention.types import Dims, Memory, Positions
from attnbench.core.errors import MissingExtraError

pytestmark = laws.NEEDED


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_over_several_blocks(name, masked):
    laws.values_and_gradients_over_several_blocks(name, masked)


@pytest.mark.parametrize("name", ["softmax", "topk", "sparsemax", "entmax15", "entmax, alpha = 1.2"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [64, 100])
def test_states_that_fill_their_tiles(name, causal, queries):
    close(*both(name, given((1, 2, queries, 130, 16, 16)), causal=causal))


@pytest.mark.parametrize("name", ["topk", "sparsemax", "entmax15"])
@pytest.mark.parametrize("keys", [20, 70])
@pytest.mark.parametrize(("size", "scale"), [(1e3, 0.5), (1e8, 0.5), (1e9, 0.3)])
def test_contexts_of_scores_far_from_zero(name, keys, size, scale):
    query, key, values = (each.detach() for each in given((1, 2, 20, keys, 16, 16)))
    query = query * size
    kernel, transform = TRANSFORMS[name]
    close(
        [fused.attend(query, key, values, kernel, scale=scale)],
        [defined(query, key, values, transform, scale, None, False)],
    )


@pytest.mark.parametrize("keys", [6, 70])
@pytest.mark.parametrize("k", [1, 40])
@pytest.mark.parametrize("grows", [False, True])
def test_keys_whose_scores_are_equal_stay_together_where_their_products_are_not(keys, k, grows):
    """Two products that differ in their last digit, of which the scale makes one score, at the edge of what is kept."""
    if not fused.interpreted():
        pytest.skip("three products of TF32 make one number of such products")
    one, other, scale = 1.9909999370574951, 1.9909998178482056, 0.5025
    assert torch.tensor(one) * scale == torch.tensor(other) * scale
    better = min(k, keys - 3) - 1
    products = torch.cat([torch.linspace(-3, 0.5, keys - better), torch.linspace(2.0, 3.0, better)])
    products[1], products[3] = one, other
    key = torch.stack([products, torch.randn(keys, generator=drawing(3))], -1)[None, None]
    states = [torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), key, torch.randn(1, 1, keys, 4, generator=drawing(2))]
    k = better + 1
    transform = build_transform("topk", k=k)
    if not grows:
        close([fused.attend(*states, Fused("topk", k), scale=scale)], [defined(*states, transform, scale, None, False)])
        return
    made = []
    for function in (
        lambda *given: fused.attend(*given, Fused("topk", k), scale=scale),
        lambda *given: defined(*given, transform, scale, None, False),
    ):
        own = [each.clone().requires_grad_() for each in states]
        context = function(*own)
        made.append([context.detach(), *torch.autograd.grad(context.sum(), own)])
    close(*made)


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax, alpha = 1.2"])
@pytest.mark.parametrize("keys", [20, 70])
@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_what_is_no_number_in_one_row_reaches_the_gradients_of_all_its_values(name, keys, strange):
    query, key, values = (each.detach() for each in given((1, 1, 5, keys, 8, 4)))
    key[0, 0, 3, 0], query[0, 0, :, 0] = strange, torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0])
    made = both(name, [each.requires_grad_() for each in (query, key, values)])
    for mine, theirs in zip(*made, strict=True):
        assert mine.isnan().any(-1).tolist() == theirs.isnan().any(-1).tolist()


@pytest.mark.parametrize("name", ["topk", "sparsemax", "entmax, alpha = 1.2"])
@pytest.mark.parametrize("length", [20, 70])
def test_nan_in_one_row_reaches_no_values_behind_it(name, length):
    query, key, values = (each.detach() for each in given((1, 1, length, length, 8, 4)))
    query[0, 0, 4, 0] = torch.nan
    context, of_query, _, of_values = both(name, [each.requires_grad_() for each in (query, key, values)], causal=True)[
        0
    ]
    for each in (context, of_query):
        assert each.isnan().any(-1).flatten().nonzero().flatten().tolist() == [4]
    assert of_values.isnan().any(-1).flatten().nonzero().max() == 4


@pytest.mark.parametrize("k", [8, 20])
def test_of_equal_keys_all_are_kept_whichever_are_looked_at(k):
    if fused.interpreted() and not products_of_equal_keys_are_equal():
        pytest.skip("on this processor numpy's products of one query with equal keys differ in their last digit")
    keys, values = torch.randn(1, 1, 1, 64, generator=drawing(1)), torch.randn(1, 1, 128, 4, generator=drawing(2))
    query = torch.randn(1, 1, 32, 64, generator=drawing(0))
    found = fused.attend(query, keys.expand(-1, -1, 128, -1), values, Fused("topk", k), scale=0.1)
    close([found], [values.mean(2, keepdim=True).expand_as(found)])


@pytest.mark.parametrize("name", ["topk, k = 8", "sparsemax", "entmax15", "entmax, alpha = 1.6"])
def test_rows_that_are_sure_stay_as_they_are_where_another_of_their_block_is_not(name, monkeypatch):
    monkeypatch.setitem(TRANSFORMS, "topk, k = 8", (Fused("topk", 8), build_transform("topk", k=8)))
    query, keys, values = given((1, 1, 32, 320, 64, 16))
    with torch.no_grad():
        keys[0, 0, 5::64] = query[0, 0, :1] + 0.1 * keys[0, 0, 5::64]  # five of the best keys of row 0, in one class
    close(*both(name, (query, keys, values), scale=64**-0.5))


@pytest.mark.parametrize("name", ["topk, k = 9", "sparsemax", "entmax15", "entmax, alpha = 1.2"])
@pytest.mark.parametrize(("classes", "masked"), [(32, False), (64, True)])
def test_best_keys_whose_places_are_of_one_class(name, masked, classes, monkeypatch):
    """More than the four of a class that are kept: the search goes on."""
    monkeypatch.setattr(fused, "_classes", lambda *given: classes)
    monkeypatch.setitem(TRANSFORMS, "topk, k = 9", (Fused("topk", 9), build_transform("topk", k=9)))
    query, keys, values = given((1, 1, 70, 600, 16, 16))
    with torch.no_grad():
        query.abs_().mul_(0.05)
        keys[:, :, 5::64] += 3.0
    valid = (torch.arange(600) % 64 == 5)[None] if masked else None
    weights = TRANSFORMS[name][1](query @ keys.mT * 0.5, valid=allowed(70, 600, valid, causal=False))
    assert int((weights[..., 5::64] > 0).sum(-1).max()) > 4
    close(*both(name, (query, keys, values), valid=valid))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("keys", [40, 200])
def test_contexts_are_the_same_where_nothing_is_differentiated(name, keys):
    states = given((1, 4, 70, keys, 64, 64), torch.bfloat16)
    kernel, _ = TRANSFORMS[name]
    wanted = fused.attend(*states, kernel, scale=0.125)
    with torch.no_grad():
        found = fused.attend(*states, kernel, scale=0.125)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["topk", "sparsemax", "entmax15", "entmax, alpha = 1.2"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scores_may_be_turned_about_or_all_be_equal(name, scale):
    close(*both(name, given((1, 1, 70, 90, 16, 16)), scale=scale))


def test_near_sparsemax_contexts_are_as_exact_and_gradients_but_for_the_edge_of_the_support(monkeypatch):
    monkeypatch.setitem(TRANSFORMS, "near", (Fused("entmax", excess=0.8), build_transform("entmax", alpha=1.8)))
    (found, *slopes), (wanted, *others) = both("near", given((2, 2, 70, 70, 24, 40)))
    close([found], [wanted])
    for mine, theirs in zip(slopes, others, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-4


@pytest.mark.parametrize("name", ["topk", "entmax15", "entmax, alpha = 1.2"])
@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        ((1, 1, 1, 1, 1, 1), False), ((3, 2, 1, 37, 16, 8), False), ((1, 2, 5, 37, 7, 5), False),
        ((1, 2, 5, 37, 7, 5), True), ((1, 1, 33, 65, 64, 17), True), ((1, 1, 3, 20, 128, 128), False),
    ],
)  # fmt: skip
def test_any_shape(name, shape, causal):
    laws.any_shape(name, shape, causal)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_rows_without_a_key_are_zero(name):
    laws.rows_without_a_key_are_zero(name)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_equal_scores_share_alike(name):
    laws.equal_scores_share_alike(name)


@pytest.mark.parametrize("k", [2, 3, 7, 40, 90])
def test_keys_that_tie_with_the_kth_are_all_kept(k):
    laws.keys_that_tie_with_the_kth_are_all_kept(k)


def test_scores_that_differ_in_their_last_digit_alone_are_told_apart():
    """The k-th key is found though bisection has no number left between it and the next."""
    values = torch.eye(6)[None, None]
    below = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))
    keys = torch.tensor([0.0, 1.0, float(below), 1.0, -3e4, 0.5]).view(1, 1, 6, 1)
    found = fused.attend(torch.ones(1, 1, 1, 1), keys, values, Fused("topk", 2), scale=1.0)
    assert found.flatten().tolist() == [0.0, 0.5, 0.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_its_row_alone_and_masked_it_spoils_none(name, strange):
    laws.what_is_no_number_spoils_its_row_alone_and_masked_it_spoils_none(name, strange)


@pytest.mark.parametrize("name", ["topk", "sparsemax", "entmax15", "entmax, alpha = 1.2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2, 33, 33, 16, 16), (1, 1, 70, 50, 128, 128), (1, 1, 150, 200, 64, 64)])
def test_half_precision_is_near_and_keeps_its_type(name, dtype, shape):
    states = given(shape, dtype)
    kernel, transform = TRANSFORMS[name]
    scale, causal = shape[4] ** -0.5, shape[2] == shape[3]
    found = fused.attend(*states, kernel, scale=scale, causal=causal)
    assert found.dtype is dtype
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, states, upstream)
    wide = [each.detach().float().requires_grad_() for each in states]
    wanted = defined(*wide, transform, scale, None, causal)
    close([found.float()], [wanted], 2e-2)
    for mine, theirs in zip(gradients, torch.autograd.grad(wanted, wide, upstream.float()), strict=True):
        assert mine.dtype is dtype
        assert float((mine.float() - theirs).norm() / theirs.norm()) < 2e-2


def test_the_gradient_for_a_learned_alpha():
    transform = build_transform("entmax", heads=3, alpha="learned")
    assert isinstance(transform, nn.Module)
    with torch.no_grad():
        transform.raw.copy_(torch.tensor([-1.5, 0.0, 1.0]))
    states = given((2, 3, 9, 40, 8, 8))
    inputs = [*states, transform.raw]
    upstream = torch.randn(2, 3, 9, 8, generator=drawing(9))
    valid = torch.rand(2, 40, generator=drawing(1)) > 0.2
    found = fused.attend(*states, Fused("entmax", excess=transform.alpha - 1), scale=0.5, valid=valid)
    wanted = defined(*states, transform, 0.5, valid, False)
    close([found], [wanted])
    close(torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream), 1e-4)


@pytest.mark.parametrize(("raw", "dtype", "error"), [
    (0.0, torch.float16, 5e-3), (-3.0, torch.float16, 5e-3), (-3.0, torch.float32, 1e-4), (-6.0, torch.float32, 1e-4),
    (-9.0, torch.float32, 1e-3), (-20.0, torch.float32, None),
])  # fmt: skip
def test_the_gradient_for_alpha_keeps_its_digits_near_softmax_and_in_half_precision(raw, dtype, error):
    """Values far from 0 make the sums that it is a difference of large."""
    states = [each.detach().requires_grad_() for each in given((1, 2, 40, 30, 8, 8), dtype)]
    with torch.no_grad():
        states[2] += 2
    upstream = torch.randn(1, 2, 40, 8, generator=drawing(9)).to(dtype)
    excess = torch.sigmoid(torch.full((2,), raw, dtype=torch.float64)).requires_grad_()
    found = fused.attend(*states, Fused("entmax", excess=excess), scale=0.5)
    (gradient,) = torch.autograd.grad(found, excess, upstream)
    wide = [each.detach().double() for each in states]
    if error is None:  # so near that it is softmax
        assert bool(gradient.isfinite().all())
        wanted = torch.softmax(wide[0] @ wide[1].mT * 0.5, -1) @ wide[2]
    else:
        wanted = build_transform("entmax", heads=2, alpha="learned").double()
        assert isinstance(wanted, nn.Module)
        with torch.no_grad():
            wanted.raw.fill_(raw)
        other = torch.autograd.grad(wanted(wide[0] @ wide[1].mT * 0.5) @ wide[2], wanted.raw, upstream.double())[0]
        other = other / (torch.sigmoid(wanted.raw) * torch.sigmoid(-wanted.raw)).detach()
        assert float((gradient - other).norm() / other.norm()) < error
        wanted = wanted(wide[0] @ wide[1].mT * 0.5) @ wide[2]
    close([found.double()], [wanted.detach()], 5e-3 if dtype is torch.float16 else 1e-4)


def test_a_mask_of_one_row_serves_all():
    states = [each.detach() for each in given((3, 1, 4, 9, 4, 4))]
    valid = torch.arange(9)[None] < 6
    found = fused.attend(*states, Fused("sparsemax"), scale=0.5, valid=valid)
    close([found], [defined(*states, build_transform("sparsemax"), 0.5, valid, False)])


def test_a_score_far_below_the_others_leaves_the_kth_where_it_is():
    keys = torch.tensor([-1e30, 1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 6, 1)
    found = fused.attend(torch.ones(1, 1, 1, 1), keys, torch.eye(6)[None, None], Fused("topk", 2), scale=1.0)
    assert (found.flatten() > 0).tolist() == [False, False, False, False, True, True]


@pytest.mark.parametrize(("name", "length"), [
    ("topk", 40), ("sparsemax", 40), ("entmax, alpha = 1.2", 40), ("topk", 96), ("entmax15", 96),
])  # fmt: skip
def test_dropout_scales_what_it_keeps_and_backward_meets_the_same_draw(name, length):
    laws.dropout_scales_what_it_keeps_and_backward_meets_the_same_draw(name, length)


def test_no_rows_and_no_keys():
    empty = torch.randn(2, 1, 0, 4, requires_grad=True)
    some = torch.randn(2, 1, 3, 4, requires_grad=True)
    fused.attend(empty, some, some, Fused("sparsemax"), scale=1.0).sum().backward()
    assert some.grad is not None
    assert not some.grad.any()
    context = fused.attend(some, empty, empty, Fused("sparsemax"), scale=1.0)
    context.sum().backward()
    assert not context.any()


def site(transform, backend, **more):
    stages = {"score": "scaled_dot", "pattern": "full", **more}
    return Site(
        scores.parse(stages["score"]), patterns.parse(stages["pattern"]), transforms.parse(transform), backend=backend
    )


@pytest.mark.parametrize("transform", ["softmax", {"kind": "topk", "k": 2}, {"kind": "entmax", "alpha": "learned"}])
@pytest.mark.parametrize("role", ["encoder_self", "decoder_self", "cross"])
def test_a_module_gives_what_it_gives_without(transform, role):
    torch.manual_seed(0)
    dims = Dims(heads=2, query_width=8, key_width=8)
    module = MultiHead(site(transform, "triton"), role, 8, dims, 0.0)
    plain = MultiHead(site(transform, "dense"), role, 8, dims, 0.0)
    plain.load_state_dict(module.state_dict())
    states, source = torch.randn(2, 7, 8), torch.randn(2, 7 if role != "cross" else 5, 8)
    valid = None if role == "decoder_self" else torch.arange(source.shape[1]) < torch.tensor([[4], [5]])
    at = Positions(torch.arange(7), torch.arange(source.shape[1]))
    outputs = []
    for each in (module, plain):
        each.zero_grad()
        memory = each.memorize(source if role == "cross" else states, valid)
        output = each(states, memory, at)
        output.context.sum().backward()
        gradients = [parameter.grad for parameter in each.parameters()]
        outputs.append([output.context.detach(), *gradients])
    close(*outputs)
    assert module(states, module.memorize(source, valid), at, need_weights=True).weights is not None


def test_a_step_of_decoding_is_a_row_of_the_full_pass():
    torch.manual_seed(0)
    module = MultiHead(site({"kind": "topk", "k": 2}, "triton"), "decoder_self", 8, Dims(0, 2, 8, 8), 0.3).eval()
    states = torch.randn(3, 6, 8)
    whole = module(states, module.memorize(states, None), Positions(torch.arange(6), torch.arange(6))).context
    cache = module.allocate(3, 6, states)
    for step in range(6):
        cache = module.append(cache, states[:, step : step + 1])
        at = Positions(torch.tensor([step]), torch.arange(step + 1))
        torch.testing.assert_close(module(states[:, step : step + 1], cache, at).context[:, 0], whole[:, step])


def test_softmax_takes_the_place_of_the_transform_where_it_is_sparse_in_training_alone():
    torch.manual_seed(0)
    sparse = site({"kind": "topk", "k": 1}, "triton")._replace(sparsify="train")
    module = MultiHead(sparse, "encoder_self", 8, Dims(0, 2, 8, 8), 0.0)
    plain = MultiHead(site("softmax", "dense"), "encoder_self", 8, Dims(0, 2, 8, 8), 0.0)
    plain.load_state_dict(module.state_dict())
    states, at = torch.randn(1, 6, 8), Positions(torch.arange(6), torch.arange(6))
    contexts = {mode: module.train(mode)(states, module.memorize(states, None), at).context for mode in (True, False)}
    wanted = plain(states, plain.memorize(states, None), at).context
    torch.testing.assert_close(contexts[False], wanted)
    assert not torch.allclose(contexts[True], wanted)


@pytest.mark.parametrize(("changed", "why"), [
    ({"pattern": {"kind": "window", "n": 3}}, "knows no pattern"),
    ({"score": "additive"}, "not a product"),
    ({"transform": "sigmoid"}, "no kernel for the transform 'sigmoid'"),
    ({"transform": {"kind": "topk", "ratio": 0.5}}, "no kernel for the transform 'topk' as it is set"),
    ({"transform": {"kind": "topk", "k": 3, "ties": "index"}}, "no kernel"),
    ({"transform": {"kind": "entmax", "alpha": 3.0}}, "no kernel"),
])  # fmt: skip
def test_what_it_cannot_serve_is_said(changed, why):
    transform = changed.pop("transform", "sparsemax")
    with pytest.raises(ValueError, match=rf"'triton' cannot serve cross: .*{why}.*drop `backend: triton`"):
        choose(site(transform, "triton", **changed), "cross")


@pytest.mark.parametrize("unknown", [Fused("sigmoid"), Fused("topk", 3, first=True), Fused("topk", share=(1, 2, 1))])
def test_what_it_does_not_know_is_refused(unknown):
    states = torch.randn(1, 1, 4, 16)
    with pytest.raises(ValueError, match="there is no kernel for"):
        fused.attend(states, states, states, unknown, scale=1.0)


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(fused, "interpreted", lambda: False)
    states = [each.detach().cpu() for each in given((1, 1, 3, 3, 4, 4))]
    with pytest.raises(MissingExtraError, match="needs a CUDA device and the package triton"):
        fused.attend(*states, Fused("sparsemax"), scale=1.0)


def test_double_precision_goes_by_the_definition():
    module, plain = (
        MultiHead(site("sparsemax", backend), "encoder_self", 8, Dims(0, 2, 8, 8), 0.0).double()
        for backend in ("triton", "dense")
    )
    plain.load_state_dict(module.state_dict())
    states, at = torch.randn(1, 4, 8).double().requires_grad_(), Positions(torch.arange(4), torch.arange(4))
    contexts = [each(states, each.memorize(states, None), at).context for each in (module, plain)]
    found, wanted = ([each, *torch.autograd.grad(each.square().sum(), states)] for each in contexts)
    close(found, wanted, 1e-12)


def test_memories_may_lie_anyhow():
    query, keys, values = (each.detach() for each in given((2, 2, 5, 6, 4, 4)))
    wanted = fused.attend(query, keys, values, Fused("entmax15"), scale=0.5)
    strided = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, keys, values)]
    cache = torch.zeros(2, 2, 9, 4)
    cache[:, :, :6] = values
    torch.testing.assert_close(fused.attend(*strided, Fused("entmax15"), scale=0.5), wanted)
    turned = keys.mT.contiguous().mT
    torch.testing.assert_close(fused.attend(query, turned, cache[:, :, :6], Fused("entmax15"), scale=0.5), wanted)
    assert Memory(keys, values).valid is None


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(9, 20), (40, 33), (70, 16)])
def test_short_rows_are_computed_in_one_go(name, causal, queries, keys, monkeypatch):
    called = []
    short = fused.kernels().backward.backward_short
    monkeypatch.setattr(fused.kernels().backward, "backward_short", Watched(short, called))
    valid = torch.ones(2, keys, dtype=torch.bool)
    valid[0, keys - 7 :] = False
    half = given((2, 1, queries, keys, 24, 40))
    found, wanted = both(name, half, valid=valid, causal=causal and queries <= keys)
    close(found[:1], wanted[:1])
    largest = max(float(each.abs().max()) for each in wanted[1:])  # gradients for keys are sums over queries
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * largest)
    assert called == ([True] if keys <= 32 else [])  # in float32 a block of keys is 32


@pytest.mark.parametrize(("keys", "at_once"), [(16, [True]), (17, [])])
def test_in_float32_wide_heads_go_back_in_one_kernel_where_it_fits_a_smaller_gpu(keys, at_once, monkeypatch):
    called, backward = [], fused.kernels().backward
    monkeypatch.setattr(backward, "backward_short", Watched(backward.backward_short, called))
    close(*both("topk", given((1, 1, 20, keys, 128, 16)), scale=128**-0.5))
    assert called == at_once


def test_negated_views_are_read_as_what_they_are():
    query, keys, values = given((1, 2, 5, 9, 8, 8))
    upstream = torch.randn(1, 2, 5, 8, generator=drawing(9))
    made = []
    for negate in (torch._neg_view, torch.neg):
        context = fused.attend(negate(query), keys, values, Fused("softmax"), scale=0.5)
        made.append([context.detach(), *torch.autograd.grad(context, [query, keys], negate(upstream))])
    close(*made)


def test_heads_of_more_numbers_than_are_counted_are_refused():
    states = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="2,147,483,647 numbers from the first state of a head"):
        fused.attend(states.expand(1, 1, 2**28, 8), states, states, Fused("softmax"), scale=1.0)


@pytest.mark.parametrize("name", ["sparsemax", "entmax, alpha = 1.2"])
@pytest.mark.parametrize("keys", [20, 70])
def test_queries_before_all_keys_have_gradients_of_zero(name, keys):
    """More queries than keys, causally: some see no key."""
    found, wanted = both(name, given((1, 2, 100, keys, 8, 8)), causal=True)
    close(found, wanted)
    assert not found[1][:, :, : 100 - keys].any()


@pytest.mark.parametrize("queries", [20, 80])
def test_an_alpha_that_is_learned_has_its_gradient_from_short_rows(queries):
    states, scale = given((2, 3, queries, 20, 24, 40)), 0.5
    upstream = torch.randn(2, 3, queries, 40, generator=drawing(9))
    raw = torch.linspace(-2, 1.5, 3).requires_grad_()
    learned = build_transform("entmax", alpha="learned", heads=3).to(DEVICE)
    with torch.no_grad():
        learned.raw.copy_(raw)
    found = fused.attend(*states, Fused("entmax", excess=torch.sigmoid(raw).view(-1, 1, 1)), scale=scale)
    wanted = learned(states[0] @ states[1].mT * scale) @ states[2]
    mine = torch.autograd.grad(found, [*states, raw], upstream)
    theirs = torch.autograd.grad(wanted, [*states, learned.raw], upstream)
    close([found.detach(), *mine], [wanted.detach(), *theirs], 2e-4)
