"""SingleHead against the reference pipeline, and against a nested loop over floats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attnbench.attention.modules.single_head import SingleHeadSpec
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.reference import attend
from attnbench.attention.scores.base import scores
from attnbench.attention.site import Site
from attnbench.attention.spec import AttentionSpec
from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import Dims, Positions
from attnbench.core.dropout import Dropout

BATCH, QUERIES, KEYS, WIDTH = 3, 4, 6, 5
NAN = float("nan")
PADDINGS = {"none": None, "ragged": (6, 4, 1), "a source without tokens": (3, 0, 5)}
TRANSFORMS = [
    transforms.get(kind).from_budget(2, "cross") or transforms.get(kind)()
    for kind in transforms.kinds()
    if "cross" in transforms.get(kind).roles and not transforms.get(kind).needs_upper
] + [transforms.parse({"kind": "entmax", "alpha": "learned"})]
EACH = pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda spec: f"{spec.kind}-{spec.digest()[:3]}")
POSITIONS = Positions(torch.arange(QUERIES), torch.arange(KEYS))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(score="dot", transform="softmax", sparsify="both", dropout=0.0, query_width=WIDTH):
    torch.manual_seed(3)
    site = Site(scores.parse(score), FullSpec(), transforms.parse(transform), sparsify)
    dims = Dims(heads=8, query_width=query_width, key_width=WIDTH)  # the model's heads are nothing to it
    module = SingleHeadSpec().build(site, "cross", 64, dims, dropout)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module.double()


def states(padding=None):
    keys, query = draw(BATCH, KEYS, WIDTH, seed=1), draw(BATCH, QUERIES, WIDTH, seed=2)
    return query, keys, None if padding is None else torch.arange(KEYS) < torch.tensor(padding)[:, None]


def close(found, wanted, tolerance=1e-12):
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("score", scores.kinds())
@EACH
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("apart", [False, True], ids=["values are the keys", "values apart"])
def test_equals_the_reference_in_values_and_gradients(score, transform, padding, apart):
    module = build(score, transform)
    query, keys, valid = states(padding)
    upstream = draw(BATCH, QUERIES, WIDTH, seed=5)
    results = []
    for own in (True, False):
        leaves = [leaf.clone().requires_grad_() for leaf in (query, keys, draw(BATCH, KEYS, WIDTH, seed=4))]
        values = leaves[2] if apart else leaves[1]
        if own:
            memory = module.memorize(leaves[1], valid, leaves[2] if apart else None)
            context, weights, _ = module(leaves[0], memory, POSITIONS, need_weights=True)
        else:
            context, weights = attend(
                leaves[0][:, None],
                module.score.keys(leaves[1][:, None]),
                values[:, None],
                score=module.score,
                transform=module.transform,
                positions=POSITIONS,
                valid=valid,
            )
            context = context[:, 0]
        parameters = [*leaves, *module.parameters()]
        grads = torch.autograd.grad((context * upstream).sum(), parameters, allow_unused=True)
        results.append([context, weights, *grads])
    for found, wanted in zip(*results, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.isfinite().all()
            close(found, wanted, 1e-11)


@pytest.mark.parametrize("padding", [(6, 4, 1), (3, 0, 5)])
def test_equals_nested_loops(padding):
    """Bahdanau et al. 2015, equations 5 and 6, with the dot product as alignment model."""
    module = build()
    query, keys, valid = states(padding)
    context, weights, _ = module(query, module.memorize(keys, valid), POSITIONS, need_weights=True)
    for b, length in enumerate(padding):
        own = keys[b, :length].tolist()
        for i, q in enumerate(query[b].tolist()):
            exponentials = [math.exp(sum(x * y for x, y in zip(q, key, strict=True))) for key in own]
            shares = [e / sum(exponentials) for e in exponentials]
            mixed = [sum(share * key[d] for share, key in zip(shares, own, strict=True)) for d in range(WIDTH)]
            close(context[b, i], torch.tensor(mixed, dtype=torch.float64))
            close(weights[b, 0, i], torch.tensor(shares + [0.0] * (KEYS - length), dtype=torch.float64))


@EACH
def test_padded_states_may_hold_anything(transform):
    """NaN, infinities and huge numbers behind the mask: the same bits, gradient 0 there, every gradient finite."""
    module = build("additive", transform)
    query, keys, valid = states((6, 4, 0))
    results = []
    for content in (0.0, NAN, torch.inf, 1e300):
        leaf = keys.masked_fill(~valid[..., None], content).requires_grad_()
        values = (keys + 1).masked_fill(~valid[..., None], content).requires_grad_()
        context = module(query, module.memorize(leaf, valid, values), POSITIONS).context
        grads = torch.autograd.grad(context.square().sum(), [leaf, values, *module.parameters()])
        assert not any(grad[~valid].any() for grad in grads[:2])
        results.append([context, *grads])
    for tensors in zip(*results, strict=True):
        for tensor in tensors:
            assert tensor.isfinite().all()
            assert torch.equal(tensor, tensors[0])


def test_a_row_without_any_key_gets_zeros():
    module = build()
    query, keys, valid = states((3, 0, 6))
    context = module(query, module.memorize(keys.requires_grad_(), valid), POSITIONS).context
    assert torch.equal(context[1], torch.zeros(QUERIES, WIDTH, dtype=torch.float64))
    (grad,) = torch.autograd.grad(context[1].sum(), keys)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("score", ["additive", "bilinear"])
def test_queries_may_be_of_another_width(score):
    module = build(score, query_width=3)
    _, keys, valid = states((6, 4, 1))
    context = module(draw(BATCH, QUERIES, 3), module.memorize(keys, valid), POSITIONS).context
    assert context.shape == (BATCH, QUERIES, WIDTH)
    assert module.context_width == WIDTH


@pytest.mark.parametrize(("score", "words"), [
    ("dot", "the score 'dot' cannot compare queries of width 3 with keys of width 5; make them equal, or take"),
    ("scaled_dot", "the score 'scaled_dot' cannot compare queries of width 3 with keys of width 5"),
])  # fmt: skip
def test_a_dot_product_needs_equal_widths(score, words):
    site = Site(scores.parse(score), FullSpec(), transforms.parse("softmax"))
    with pytest.raises(ValueError, match=words):
        SingleHeadSpec().check(site, 3, WIDTH)
    SingleHeadSpec().check(site, WIDTH, WIDTH)


def test_sparsify_train_is_softmax_in_eval_mode():
    query, keys, valid = states((6, 4, 1))
    found = {}
    for name, module in (
        ("train", build("additive", {"kind": "topk", "k": 2}, "train")),
        ("both", build("additive", {"kind": "topk", "k": 2})),
        ("softmax", build("additive")),
    ):
        for training in (True, False):
            module.train(training)
            found[name, training] = module(query, module.memorize(keys, valid), POSITIONS).context
    assert torch.equal(found["train", True], found["both", True])
    assert torch.equal(found["train", False], found["softmax", False])
    assert not torch.allclose(found["train", False], found["both", False], atol=1e-4)


def test_dropout_is_on_the_weights_and_only_in_training():
    module = build(dropout=0.5)
    query, keys, valid = states()
    memory = module.memorize(keys, valid)
    plain = module.eval()(query, memory, POSITIONS, need_weights=True)
    module.train()
    torch.manual_seed(0)
    found = module(query, memory, POSITIONS, need_weights=True)
    torch.manual_seed(0)
    close(found.context, (Dropout(0.5).train()(plain.weights) @ keys[:, None])[:, 0])
    assert not torch.allclose(found.context, plain.context)
    assert torch.equal(found.weights, plain.weights)


def test_weights_come_only_when_asked_for():
    module = build()
    query, keys, valid = states()
    memory = module.memorize(keys, valid)
    assert module(query, memory, POSITIONS).weights is None
    assert module(query, memory, POSITIONS, need_weights=True).weights.shape == (BATCH, 1, QUERIES, KEYS)


@pytest.mark.parametrize("score", scores.kinds())
def test_half_precision_weights_work_too(score):
    module = build(score, {"kind": "topk", "k": 2}).bfloat16()
    query, keys, valid = states((6, 4, 0))
    context = module(query.bfloat16(), module.memorize(keys.bfloat16(), valid), POSITIONS).context
    assert context.dtype == torch.bfloat16
    assert context.isfinite().all()


def test_what_is_spent_is_before_dropout():
    """A step gives one unit, whatever dropout makes of it."""
    site = AttentionSpec.model_validate({"cross": {"module": "single_head", "transform": "csparsemax"}}).site("cross")
    torch.manual_seed(3)
    module = site.build("cross", 64, Dims(heads=1, query_width=WIDTH, key_width=WIDTH), 0.5).double().train()
    query, keys, _ = states()
    memory = module.memorize(keys, None)._replace(fertility=torch.full((BATCH, KEYS), 2.0, dtype=torch.float64))
    history = None
    for steps in (1, 2):
        _, _, history = module(query[:, :1], memory, Positions(torch.arange(1), torch.arange(KEYS)), history=history)
        close(history.spent.sum(-1), torch.full((BATCH, 1), float(steps), dtype=torch.float64))
