"""Torch's fused attention gives what the definition gives, rows without a key and any causal offset among it."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.backends import sdpa
from attnbench.attention.backends.base import choose
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import patterns
from attnbench.attention.scores.base import scores
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import transforms
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.types import Dims, Positions


def site(backend, transform="softmax", pattern="full", score="scaled_dot"):
    return Site(scores.parse(score), patterns.parse(pattern), transforms.parse(transform), backend=backend)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(5, 7, False), (6, 6, True), (1, 7, True), (3, 7, True), (7, 3, True)]
)
def test_values_and_gradients_equal_the_definition(queries, keys, causal, masked):
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(3, 2, count, 4, generator=draw, dtype=torch.float64).requires_grad_()
        for count in (queries, keys, keys)
    ]
    valid = torch.arange(keys) < torch.tensor([[keys], [2], [0]]) if masked else None
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    allowed = allowed.tril(keys - queries) if causal else allowed
    allowed = allowed if valid is None else allowed & valid[:, None, None]
    found = sdpa.attend(*states, scale=0.5, valid=valid, causal=causal)
    wanted = softmax(states[0] @ states[1].mT * 0.5, valid=allowed) @ states[2]
    upstream = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
    for mine, theirs in zip(
        [found, *torch.autograd.grad(found, states, upstream)],
        [wanted, *torch.autograd.grad(wanted, states, upstream)], strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("role", ["encoder_self", "decoder_self", "cross"])
def test_a_module_gives_what_it_gives_without(role):
    torch.manual_seed(0)
    module, plain = (MultiHead(site(name), role, 8, Dims(0, 2, 8, 8), 0.0) for name in ("sdpa", "dense"))
    plain.load_state_dict(module.state_dict())
    states, source = torch.randn(2, 6, 8), torch.randn(2, 4 if role == "cross" else 6, 8)
    valid = None if role == "decoder_self" else torch.arange(source.shape[1]) < torch.tensor([[3], [4]])
    at = Positions(torch.arange(6), torch.arange(source.shape[1]))
    found, wanted = (
        each(states, each.memorize(source if role == "cross" else states, valid), at).context
        for each in (module, plain)
    )
    torch.testing.assert_close(found, wanted)


def test_weights_are_dropped_in_training_alone():
    module = MultiHead(site("sdpa"), "encoder_self", 8, Dims(0, 2, 8, 8), 0.5)
    states, at = torch.randn(1, 6, 8), Positions(torch.arange(6), torch.arange(6))
    contexts = {
        mode: [module.train(mode)(states, module.memorize(states, None), at).context for _ in range(2)]
        for mode in (True, False)
    }
    assert not torch.equal(*contexts[True])
    assert torch.equal(*contexts[False])


def test_on_a_gpu_softmax_goes_through_it_and_sparse_transforms_through_triton():
    assert choose(site("auto"), "cross").gpu == "sdpa"
    assert choose(site("auto", "sparsemax"), "cross").gpu == "triton"
    for same in ({"kind": "topk", "k": 0}, {"kind": "topk", "ratio": 1.0}, {"kind": "entmax", "alpha": 1}):
        assert choose(site("auto", same), "cross").gpu == "sdpa"
    for other in ("sigmoid", {"kind": "topk", "k": 2, "ties": "index"}, {"kind": "topk", "ratio": 0.5}):
        assert choose(site("auto", other), "cross").gpu is None
    assert choose(site("auto", {"kind": "topk_oow", "n": 4}), "encoder_self").gpu is None
    assert choose(site("auto", {"kind": "topk_oow", "n": 1}), "encoder_self").gpu == "triton"
    assert choose(site("dense"), "cross").gpu is None
    assert str(choose(site("auto"), "cross")).endswith("; on a GPU sdpa")


class Drawing(ScaledDotSpec):
    """A product of queries and keys that draws something when it is built."""

    def build(self, dims):
        torch.randn(1)
        return super().build(dims)


@pytest.mark.parametrize("score", ["additive", "bilinear", "scaled_dot"])
@pytest.mark.parametrize(("backend", "transform"), [("auto", "entmax"), ("sdpa", "softmax"), ("triton", "sparsemax")])
def test_to_choose_draws_nothing(backend, transform, score):
    given = site(backend, {"kind": "entmax", "alpha": "learned"} if transform == "entmax" else transform)
    given = given._replace(score=site("auto", score=score).score if backend == "auto" else Drawing())
    before = torch.get_rng_state()
    choose(given, "cross")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("changed", "why"), [
    ({"transform": "sparsemax"}, "knows softmax, not the transform 'sparsemax'"),
    ({"pattern": {"kind": "window", "n": 3}}, "knows no pattern"),
    ({"score": "additive"}, "not a product"),
])  # fmt: skip
def test_what_it_cannot_serve_is_said(changed, why):
    with pytest.raises(ValueError, match=f"'sdpa' cannot serve cross: .*{why}.*drop `backend: sdpa`"):
        choose(site("sdpa", **changed), "cross")
