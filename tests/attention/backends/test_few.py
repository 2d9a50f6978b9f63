"""Attention of a few queries in one call is its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attnbench.attention.backends import few
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import patterns
from attnbench.attention.scores.base import scores
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import Fused, transforms
from attnbench.attention.transforms.sparsemax import sparsemax
from attnbench.attention.types import Dims, Memory, Positions
from attnbench.core import native

compiled = pytest.mark.usefixtures("_compiled")


@pytest.fixture(scope="module")
def _compiled():
    if native.load(few._SOURCE) is None:
        pytest.skip("no C++ compiler: the stages serve")


def cache(rows, heads, capacity, width):
    return torch.randn(rows, heads, capacity, width)


KINDS = {
    "softmax": {"kind": "softmax"},
    "top-3": {"kind": "topk", "k": 3},
    "all": {"kind": "topk", "k": 0},
    "more than there are": {"kind": "topk", "k": 2**31 - 1},
    "sparsemax": {"kind": "sparsemax"},
    "entmax15": {"kind": "entmax15"},
    "alpha": {"kind": "entmax", "alpha": 1.3},
    "learned": {"kind": "entmax", "alpha": "learned"},
    "gates": {"kind": "sigmoid"},
    "top-3, ties by index": {"kind": "topk", "k": 3, "ties": "index"},
    "a part": {"kind": "topk", "ratio": 0.2},
}


def built(raw):
    """A transform, and what kernels know of it; a learned alpha is another one for each of two heads."""
    spec = transforms.parse(raw)
    made = spec.build(Dims(0, 2, 17, 17))
    if isinstance(made, nn.Module):
        with torch.no_grad():
            made.raw.copy_(torch.tensor([-1.4, 2.0]))
    return made, spec.fused(made)


@compiled
@pytest.mark.parametrize("raw", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("queries", [1, 3, 5, 8])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_attention_in_one_call_is_its_definition(raw, queries, masked):
    made, kernel = built(raw)
    query, keys, values = torch.randn(3, 2, queries, 17), cache(3, 2, 40, 17)[:, :, :31], cache(3, 2, 31, 20)
    valid = torch.rand(3, 31) < 0.6 if masked else None
    if valid is not None:
        valid[1] = False
        keys[~valid[:, None, :].expand(-1, 2, -1)] = float("nan")
    assert few.serves(query, keys, values, kernel)
    mask = None if valid is None else valid[:, None, None, :]
    found = few.attend(query, keys, values, scale=0.3, transform=kernel, valid=mask)
    with native.off():
        weights = made((query * 0.3) @ keys.mT, valid=mask)
    torch.testing.assert_close(found, weights @ values, rtol=1e-4, atol=1e-5)
    if valid is not None:
        assert (found[1] == 0).all()


@compiled
@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize("sparsify", ["both", "train"])
@torch.no_grad()
def test_keys_of_a_window_are_kept_whatever_their_scores(role, sparsify, monkeypatch):
    site = Site(scores.parse("scaled_dot"), patterns.parse("full"), transforms.parse({"kind": "topk_oow", "n": 5}))
    modules = [
        MultiHead(site._replace(backend=name, sparsify=sparsify), role, 8, Dims(0, 2, 8, 8), 0.0).eval()
        for name in ("auto", "dense")
    ]
    modules[1].load_state_dict(modules[0].state_dict())
    calls, attend = [], few.attend
    monkeypatch.setattr(few, "attend", lambda *given, **more: calls.append(1) or attend(*given, **more))
    states = torch.randn(3, 10, 8)
    asked = range(10) if role == "encoder_self" else [9]
    at = Positions(torch.tensor(asked), torch.arange(10))
    found, wanted = (each(states[:, asked], each.memorize(states, None), at).context for each in modules)
    assert len(calls) == 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    if sparsify == "both":
        without = Fused("topk", 3)
        monkeypatch.setattr(few, "attend", lambda *given, **more: attend(*given, **{**more, "transform": without}))
        other = modules[0](states[:, asked], modules[0].memorize(states, None), at).context
        assert not torch.allclose(other, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("raw", ["softmax", {"kind": "topk_oow", "n": 5}], ids=str)
@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@torch.no_grad()
def test_a_step_is_compiled_by_torch_in_one_piece(raw, role):
    site = Site(scores.parse("scaled_dot"), patterns.parse("full"), transforms.parse(raw))
    module = MultiHead(site, role, 8, Dims(0, 2, 8, 8), 0.0).eval()
    states = torch.randn(3, 6, 8)
    memory, at = module.memorize(states, None), Positions(torch.tensor([5]), torch.arange(6))

    def step(query):
        return module(query, memory, at).context

    whole = torch.compile(step, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(states[:, 5:]), step(states[:, 5:]), rtol=1e-4, atol=1e-5)


def test_no_other_device_is_asked_whether_a_pass_is_a_step():
    """It would be waited for."""
    for raw in ("sigmoid", {"kind": "topk_oow", "n": 5}, {"kind": "topk", "ratio": 0.5}):
        site = Site(scores.parse("scaled_dot"), patterns.parse("full"), transforms.parse(raw))
        module = MultiHead(site, "decoder_self", 8, Dims(0, 2, 8, 8), 0.0).eval()
        there = torch.empty(2, 2, 1, 4, device="meta")
        at = Positions(torch.empty(1, device="meta"), torch.empty(6, device="meta"))
        keys = torch.empty(2, 2, 6, 4, device="meta")
        assert module._kernel_for(there, keys, keys, Memory(keys, keys), at) is None


@compiled
@pytest.mark.parametrize("queries", [1, 5])
@torch.no_grad()
def test_queries_lie_as_they_lie_and_the_heads_of_a_context_side_by_side(queries):
    states, keys, values = torch.randn(3, queries, 4 * 17), cache(3, 4, 9, 17), cache(3, 4, 9, 20)
    split = states.unflatten(-1, (4, -1)).transpose(1, 2)
    wanted = torch.softmax(0.3 * split @ keys.mT, -1) @ values
    for query in (split, split.contiguous(), split.mT.contiguous().mT, torch.stack([split, split], -1)[..., 0]):
        found = few.attend(query, keys, values, scale=0.3, transform=Fused("softmax"))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert found.transpose(1, 2).is_contiguous()


@compiled
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("count", [1, 6, 40])
@torch.no_grad()
def test_listed_keys_are_read_alone(shape, queries, count):
    """In whatever order, more than once too; what stands at others is no matter."""
    query, keys, values = torch.randn(3, 2, queries, 17), cache(3, 2, 31, 17), cache(3, 2, 31, 20)
    listed = torch.randint(0, 15, (*shape, count)) * 2
    keys[:, :, 1::2], values[:, :, 1::2] = float("nan"), float("nan")
    valid = torch.rand(3, 2, 1, count) < 0.7
    found = few.attend(query, keys, values, scale=0.3, transform=Fused("sparsemax"), valid=valid, listed=listed)
    at = listed.expand(3, 2, count)[..., None]
    with native.off():
        weights = sparsemax((query * 0.3) @ keys.take_along_dim(at, 2).mT, valid=valid)
    torch.testing.assert_close(found, weights @ values.take_along_dim(at, 2), rtol=1e-4, atol=1e-5)


@compiled
@pytest.mark.parametrize("wrong", [-1, 6])
def test_listed_keys_that_are_not_there_are_an_error(wrong):
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    with pytest.raises(IndexError, match="beyond the 6 that there are"):
        few.attend(query, keys, keys, scale=1.0, transform=Fused("softmax"), listed=torch.tensor([[[0, wrong]]]))


@compiled
@pytest.mark.parametrize("listed", [
    torch.zeros(1, 2, 3, dtype=torch.int32),
    torch.zeros(2, 3, dtype=torch.int64),
    torch.zeros(3, 2, 1, dtype=torch.int64),
], ids=["int32", "two dimensions", "three rows of two"])  # fmt: skip
def test_lists_that_do_not_fit_are_an_error(listed):
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    with pytest.raises(ValueError, match="do not fit 2 rows of 2 heads"):
        few.attend(query, keys, keys, scale=1.0, transform=Fused("softmax"), listed=listed)


@compiled
@torch.no_grad()
def test_several_threads_share_the_rows():
    query, keys, values = torch.randn(16, 4, 5, 32), cache(16, 4, 50, 32), cache(16, 4, 50, 32)
    torch.set_num_threads(2)
    try:
        found = few.attend(query, keys, values, scale=1.0, transform=Fused("softmax"))
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(found, torch.softmax(query @ keys.mT, -1) @ values, rtol=1e-4, atol=1e-5)


@compiled
@torch.no_grad()
def test_a_mask_of_another_length_is_an_error():
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    short = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="does not broadcast"):
        few.attend(query, keys, keys, scale=1.0, transform=Fused("softmax"), valid=short)


@compiled
@pytest.mark.parametrize("raw", [math.nan, -110.0])
@torch.no_grad()
def test_alphas_that_the_kernel_does_not_know_are_left_to_the_definition(raw):
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    assert not few.serves(query, keys, keys, Fused("entmax", excess=torch.sigmoid(torch.tensor([raw]))))


@compiled
@pytest.mark.parametrize("raw", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("role", ["decoder_self", "cross"])
def test_a_step_of_decoding_goes_through_one_call_and_nothing_else_does(raw, role, monkeypatch):
    calls = []
    attend = few.attend
    monkeypatch.setattr(few, "attend", lambda *given, **more: calls.append(1) or attend(*given, **more))
    site = Site(scores.parse("scaled_dot"), patterns.parse("full"), transforms.parse(raw))
    module = MultiHead(site, role, 8, Dims(0, 2, 8, 8), 0.5).eval()
    states = torch.randn(3, 6, 8)
    memory = module.memorize(states, None)

    def at(*places):
        return Positions(torch.tensor(places), torch.arange(6))

    with torch.no_grad():
        found = module(states[:, 5:], memory, at(5)).context
        assert len(calls) == 1
        with native.off():
            torch.testing.assert_close(module(states[:, 5:], memory, at(5)).context, found, rtol=1e-4, atol=1e-5)
        module(states[:, 2:3], memory, at(2))  # of decoder_self, keys of the future would be seen
        assert len(calls) == (1 if role == "decoder_self" else 2)
        calls.clear()
        module(states[:, 5:], memory, at(5), need_weights=True)
        module.train()(states[:, 5:], memory, at(5))
        module(torch.randn(3, 11, 8), memory, Positions(torch.full((11,), 5), torch.arange(6)))
    module.eval()(states[:, 5:], memory, at(5))
    assert not calls


@compiled
def test_what_attention_in_one_call_serves():
    plain = Fused("softmax")
    query, keys = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 6, 4)
    assert few.serves(query, keys, keys, plain)
    assert not few.serves(query, keys, keys[:, :, :5], plain)
    assert not few.serves(query, keys[..., :3], keys, plain)
    assert not few.serves(query, keys, keys.double(), plain)
    assert not few.serves(query.bfloat16(), keys.bfloat16(), keys.bfloat16(), plain)
    assert not few.serves(query, keys.mT.contiguous().mT, keys, plain)
    assert not few.serves(query, keys, keys.mT.contiguous().mT, plain)
    with native.off():
        assert not few.serves(query, keys, keys, plain)
    keys.requires_grad_()
    assert not few.serves(query, keys, keys, plain)
    with torch.no_grad():
        assert few.serves(query, keys, keys, plain)
