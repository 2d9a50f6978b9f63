"""MultiHead against the reference pipeline: values and gradients, every transform, site and padding."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest
import torch
from torch import nn

from attnbench.attention import cached
from attnbench.attention.modules.multihead import MultiHead, MultiHeadSpec
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.reference import attend
from attnbench.attention.scores.base import scores
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import transforms
from attnbench.attention.transforms.softmax import SoftmaxSpec
from attnbench.attention.types import ROLES, Dims, Positions
from attnbench.core.dropout import Dropout
from attnbench.core.ragged import Ragged

BATCH, HEADS, QUERIES, KEYS, WIDTH = 3, 2, 4, 6, 8
NAN = float("nan")
VARIANTS = [{"kind": "entmax", "alpha": "learned"}, {"kind": "entmax", "alpha": 1.8}, {"kind": "topk", "ratio": 0.4}]
PADDINGS = {"none": None, "ragged": (6, 4, 1), "a source without tokens": (3, 0, 5)}


def filled(kind, role):
    cls = transforms.get(kind)
    return cls.from_budget(2, role) or cls()


CASES = [
    pytest.param(spec, role, id=f"{role}-{spec.kind}-{spec.digest()[:3]}")
    for role in ROLES
    for spec in [*(filled(kind, role) for kind in transforms.kinds()), *map(transforms.parse, VARIANTS)]
    if role in spec.roles and not spec.needs_upper
]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(transform=None, role="cross", score=None, sparsify="both", dropout=0.0):
    torch.manual_seed(3)
    site = Site(score or ScaledDotSpec(), FullSpec(), transform or SoftmaxSpec(), sparsify)
    module = MultiHeadSpec().build(site, role, WIDTH, Dims(heads=HEADS, query_width=WIDTH, key_width=WIDTH), dropout)
    for parameter in module.parameters():  # biases and alphas that matter
        nn.init.normal_(parameter, std=0.7)
    return site, module.double()


def states(role, padding):
    keys = draw(BATCH, KEYS, WIDTH, seed=1)
    query = draw(BATCH, QUERIES, WIDTH, seed=2) if role == "cross" else keys
    valid = None if padding is None else torch.arange(KEYS) < torch.tensor(padding)[:, None]
    return query, keys, valid, Positions(torch.arange(query.shape[1]), torch.arange(KEYS))


def heads_of(states):
    """Head h reads the columns h*E to (h+1)*E."""
    width = WIDTH // HEADS
    return torch.stack([states[..., h * width : (h + 1) * width] for h in range(HEADS)], dim=1)


def by_reference(module, site, role, query, keys, values, valid, positions):
    key_weight, value_weight = module.project_memory.weight[:WIDTH], module.project_memory.weight[WIDTH:]
    key_bias, value_bias = module.project_memory.bias[:WIDTH], module.project_memory.bias[WIDTH:]
    kept = site.transform.keep(role)
    context, weights = attend(
        heads_of(query @ module.project_query.weight.T + module.project_query.bias),
        module.score.keys(heads_of(keys @ key_weight.T + key_bias)),
        heads_of(values @ value_weight.T + value_bias),
        score=module.score,
        transform=module.transform,
        positions=positions,
        rule=site.pattern.mask_mod(role),
        kept=kept.mask_mod(role) if kept else None,
        valid=valid,
    )
    joined = torch.cat([context[:, h] for h in range(HEADS)], dim=-1)
    return joined @ module.project_context.weight.T + module.project_context.bias, weights


def close(found, wanted, tolerance=1e-11):
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("transform", "role"), CASES)
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("apart", [False, True], ids=["values are the keys", "values apart"])
def test_equals_the_reference_in_values_and_gradients(transform, role, padding, apart):
    site, module = build(transform, role)
    query, keys, valid, positions = states(role, padding)
    values = draw(BATCH, KEYS, WIDTH, seed=4)
    upstream = draw(BATCH, query.shape[1], WIDTH, seed=5)
    results = []
    for own in (True, False):
        leaves = [leaf.clone().requires_grad_() for leaf in (query, keys, values)]
        if own:
            memory = module.memorize(leaves[1], valid, leaves[2] if apart else None)
            context, weights, _ = module(leaves[0], memory, positions, need_weights=True)
        else:
            value_leaf = leaves[2] if apart else leaves[1]
            context, weights = by_reference(module, site, role, leaves[0], leaves[1], value_leaf, valid, positions)
        wanted = [*leaves, *module.parameters()]
        grads = torch.autograd.grad((context * upstream).sum(), wanted, allow_unused=True)
        results.append([context, weights, *grads])
    for found, wanted in zip(*results, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.isfinite().all()
            close(found, wanted)


@pytest.mark.parametrize("kind", scores.kinds())
def test_every_score_can_stand_in_it(kind):
    site, module = build(score=scores.parse(kind))
    query, keys, valid, positions = states("cross", (6, 4, 1))
    context = module(query, module.memorize(keys, valid), positions).context
    close(context, by_reference(module, site, "cross", query, keys, keys, valid, positions)[0])


@pytest.mark.parametrize(("transform", "role"), CASES)
def test_padded_states_may_hold_anything(transform, role):
    """NaN, infinities and huge numbers behind the mask: the same bits, gradient 0 there, every gradient finite."""
    _, module = build(transform, role)
    query, keys, valid, positions = states(role, (6, 4, 0))
    query = draw(BATCH, len(positions.q), WIDTH, seed=2)  # queries are real states, whatever the keys hold
    results = []
    for content in (0.0, NAN, torch.inf, 1e300):
        leaf = keys.masked_fill(~valid[..., None], content).requires_grad_()
        values = (keys + 1).masked_fill(~valid[..., None], content).requires_grad_()
        context = module(query, module.memorize(leaf, valid, values), positions).context
        grads = torch.autograd.grad(context.square().sum(), [leaf, values, *module.parameters()])
        assert not any(grad[~valid].any() for grad in grads[:2])
        results.append([context, *grads])
    for tensors in zip(*results, strict=True):
        for tensor in tensors:
            assert tensor.isfinite().all()
            assert torch.equal(tensor, tensors[0])


def test_a_row_without_any_key_gets_the_bias_of_the_projection():
    _, module = build()
    query, keys, valid, positions = states("cross", (3, 0, 6))
    memory = module.memorize(keys.requires_grad_(), valid)
    context = module(query, memory, positions).context
    assert torch.equal(context[1], module.project_context.bias.expand(QUERIES, WIDTH))
    (grad,) = torch.autograd.grad(context[1].sum(), keys)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("need_weights", [False, True])
def test_no_query_and_no_key_give_an_empty_context(role, need_weights):
    _, module = build(role=role)
    none, at = draw(BATCH, 0, WIDTH), torch.arange(0)
    out = module.eval()(none, module.memorize(none, None), Positions(at, at), need_weights=need_weights)
    assert out.context.shape == (BATCH, 0, WIDTH)


@pytest.mark.parametrize(("transform", "role"), CASES)
def test_sparsify_train_is_softmax_in_eval_mode(transform, role):
    _, module = build(transform, role, sparsify="train")
    _, always = build(transform, role)
    _, dense = build(SoftmaxSpec(), role)
    dense.load_state_dict({name: tensor for name, tensor in module.state_dict().items() if "transform" not in name})
    query, keys, valid, positions = states(role, (6, 4, 1))
    found = {}
    for name, member in (("train", module), ("both", always), ("softmax", dense)):
        for training in (True, False):
            member.train(training)
            found[name, training] = member(query, member.memorize(keys, valid), positions).context
    assert torch.equal(found["train", True], found["both", True])
    assert torch.equal(found["both", True], found["both", False])
    assert torch.equal(found["train", False], found["softmax", False])
    if transform.kind != "softmax":
        assert not torch.allclose(found["train", False], found["both", False], atol=1e-4)


def test_dropout_is_on_the_weights_and_only_in_training():
    _, module = build(dropout=0.5)
    query, keys, valid, positions = states("cross", None)
    memory = module.memorize(keys, valid)
    module.eval()
    plain = module(query, memory, positions, need_weights=True)
    module.train()
    torch.manual_seed(0)
    found = module(query, memory, positions, need_weights=True)
    torch.manual_seed(0)
    thinned = Dropout(0.5).train()(plain.weights) @ memory.values
    joined = torch.cat([thinned[:, h] for h in range(HEADS)], dim=-1)
    close(found.context, module.project_context(joined))
    assert not torch.allclose(found.context, plain.context)
    assert torch.equal(found.weights, plain.weights)  # what is measured is what was chosen


def test_weights_come_only_when_asked_for():
    _, module = build()
    query, keys, valid, positions = states("cross", None)
    memory = module.memorize(keys, valid)
    assert module(query, memory, positions).weights is None
    assert module(query, memory, positions, need_weights=True).weights.shape == (BATCH, HEADS, QUERIES, KEYS)


@pytest.mark.parametrize("k", [1, 3])
def test_bfloat16_makes_no_ties(k):
    """Scores are float32 under autocast: in bfloat16 many would be equal, and top-k would keep them all."""
    torch.manual_seed(0)
    dims = Dims(heads=HEADS, query_width=16, key_width=16)
    site = Site(ScaledDotSpec(), FullSpec(), transforms.parse({"kind": "topk", "k": k}))
    module = MultiHeadSpec().build(site, "cross", 16, dims, 0.0)
    query, keys = torch.randn(4, 50, 16), torch.randn(4, 300, 16)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(query, module.memorize(keys, None), Positions(torch.arange(50), torch.arange(300)),
                        need_weights=True)  # fmt: skip
    assert output.context.dtype == torch.bfloat16
    assert output.weights.dtype == torch.float32
    kept = (output.weights > 0).sum(-1)
    assert (kept == k).float().mean() > 0.999


def test_half_precision_weights_work_too():
    _, module = build(filled("topk", "cross"))
    module = module.bfloat16()
    query, keys, valid, positions = states("cross", (6, 4, 0))
    context = module(query.bfloat16(), module.memorize(keys.bfloat16(), valid), positions).context
    assert context.dtype == torch.bfloat16
    assert context.isfinite().all()


def test_a_full_cache_refuses_more():
    _, module = build(role="decoder_self")
    cache = module.allocate(BATCH, 2, torch.zeros(1, dtype=torch.float64))
    new = draw(BATCH, 1, WIDTH)
    cache = module.append(module.append(cache, new), new)
    with pytest.raises(ValueError, match="the cache holds 2 positions; 3 were asked for"):
        module.append(cache, new)


def test_width_must_be_a_multiple_of_the_heads():
    site = Site(ScaledDotSpec(), FullSpec(), SoftmaxSpec())
    with pytest.raises(ValueError, match="width 8 cannot be split over 3 heads"):
        MultiHead(site, "cross", 8, Dims(heads=3), 0.0)


def test_initial_weights_are_xavier_and_biases_zero():
    torch.manual_seed(0)
    site = Site(ScaledDotSpec(), FullSpec(), SoftmaxSpec())
    module = MultiHeadSpec().build(site, "cross", 64, Dims(heads=4, query_width=64, key_width=64), 0.0)
    for linear in (module.project_query, module.project_memory, module.project_context):
        bound = (6 / sum(linear.weight.shape)) ** 0.5
        assert linear.weight.abs().max() <= bound
        assert linear.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert not linear.bias.any()


def test_every_combination_was_tried():
    """The lists above cover each registered transform at each site it may take, but for those that look back."""
    tried = {(case.values[0].kind, case.values[1]) for case in CASES}
    every = itertools.product(transforms.kinds(), ROLES)
    assert tried == {
        (kind, role)
        for kind, role in every
        if role in transforms.get(kind).roles and not transforms.get(kind).needs_upper
    }


@pytest.mark.parametrize("name", ["memorize", "forward"])
@pytest.mark.parametrize("mixed_in", [False, True])
def test_what_a_subclass_changes_holds_without_padding_too(name, mixed_in):
    def doubled(self, *given, **more):
        found = getattr(MultiHead, name)(self, *given, **more)
        return (
            found._replace(values=found.values * 2) if name == "memorize" else found._replace(context=found.context * 2)
        )

    module = build(role="encoder_self")[1]
    mixin = type("Mixin", (), {name: doubled})
    module.__class__ = type(
        "Doubled", (mixin, MultiHead) if mixed_in else (MultiHead,), {} if mixed_in else {name: doubled}
    )
    query, keys, valid, positions = states("encoder_self", (6, 4, 1))
    ragged = Ragged.of(valid)
    wanted = module(query, module.memorize(keys, valid), positions).context[valid]
    memory = module.memorize_ragged(keys[valid], ragged, valid)
    torch.testing.assert_close(module.answer_ragged(query[valid], ragged, memory, positions), wanted)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # no input of the memory's keys has a gradient
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_run_without_padding_too(kind, everywhere):
    """Of the module itself, and of all modules."""
    module, seen = build(role="encoder_self")[1], []
    query, keys, valid, positions = states("encoder_self", (6, 4, 1))
    ragged = Ragged.of(valid)
    wanted = module(query, module.memorize(keys, valid), positions).context[valid]
    place, name = (
        (torch.nn.modules.module, f"register_module_{kind}_hook") if everywhere else (module, f"register_{kind}_hook")
    )
    hook = getattr(place, name)(lambda *call: seen.append(call[0]))
    try:
        memory = module.memorize_ragged(keys[valid], ragged, valid)
        found = module.answer_ragged(query[valid].requires_grad_(), ragged, memory, positions)
        found.sum().backward()
    finally:
        hook.remove()
    assert [each for each in seen if each is module] == [module]
    torch.testing.assert_close(found, wanted)


class Own(MultiHeadSpec):
    kind: Literal["own"] = "own"

    def build(self, *given: Any, **more: Any) -> MultiHead:
        return super().build(*given, **more)


def test_who_builds_otherwise_may_split_the_width_otherwise():
    """Else kernels that fit are refused, or ones that do not are asked for."""
    assert MultiHeadSpec.headed
    assert Own.headed is None


@pytest.mark.parametrize("kind", ["softmax", "topk", "entmax15"])
@pytest.mark.parametrize("length", [1, 2, cached.MOST])
def test_a_short_pass_is_no_step(kind, length):
    """A step sees all keys, and so does no position of a pass but the last."""
    _, module = build(transforms.parse(kind) if kind != "topk" else filled(kind, "decoder_self"), "decoder_self")
    module.float().eval()
    given, at = draw(BATCH, length, WIDTH).float(), Positions(torch.arange(length), torch.arange(length))
    with torch.no_grad():
        memory = module.memorize(given, None)
        found = module(given, memory, at, need_weights=False).context
        wanted, weights, _ = module(given, memory, at, need_weights=True)
    assert not weights.triu(1).any()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
