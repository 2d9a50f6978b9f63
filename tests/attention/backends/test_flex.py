"""FlexAttention gives what the definition gives: forward, which is all that torch has of it on a processor."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.backends import flex
from attnbench.attention.backends.base import choose
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import patterns
from attnbench.attention.reference import attend
from attnbench.attention.scores.base import scores
from attnbench.attention.scores.dot import ScaledDot
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import transforms
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.types import Dims, Positions
from attnbench.core.errors import MissingExtraError
from attnbench.core.ragged import Ragged
from attnbench.models.base import Sizes, Source, models

PATTERNS = ("full", "window", "block", "dilated", "global")


def pattern(kind):
    return patterns.parse(kind if kind == "full" else {"kind": kind, "n": 5})


def site(kind="window", backend="flex", transform="softmax", score="scaled_dot"):
    given = pattern(kind) if isinstance(kind, str) else patterns.parse(kind)
    return Site(scores.parse(score), given, transforms.parse(transform), backend=backend)


@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize("length", [1, 30, 150])
def test_it_equals_the_definition(kind, role, length):
    torch.manual_seed(0)
    query, keys, values = (torch.randn(2, 2, length, 16) for _ in range(3))
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, length // 2 :] = False
    rule, at = pattern(kind).mask_mod(role), torch.arange(length)
    with torch.no_grad():
        found = flex.attend(query, keys, values, rule=rule, scale=0.25, valid=valid)
    wanted, _ = attend(
        query, keys, values,
        score=ScaledDot(Dims(query_width=16)), transform=softmax, positions=Positions(at, at), rule=rule, valid=valid,
    )  # fmt: skip
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize("length", [30, 150])
def test_values_and_gradients_equal_the_definition_on_a_gpu(kind, role, length):
    torch.manual_seed(0)
    states = [torch.randn(2, 2, length, 32).cuda().requires_grad_() for _ in range(3)]
    valid = torch.ones(2, length, dtype=torch.bool, device="cuda")
    valid[1, length // 2 :] = False
    rule, at = pattern(kind).mask_mod(role), torch.arange(length, device="cuda")
    score = ScaledDot(Dims(query_width=32)).cuda()
    found = flex.attend(*states, rule=rule, scale=32**-0.5, valid=valid)
    wanted, _ = attend(*states, score=score, transform=softmax, positions=Positions(at, at), rule=rule, valid=valid)
    upstream = torch.randn_like(wanted)
    for mine, theirs in zip(
        [found, *torch.autograd.grad(found, states, upstream)],
        [wanted, *torch.autograd.grad(wanted, states, upstream)], strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_a_module_takes_it_for_full_passes_and_the_definition_for_steps():
    torch.manual_seed(0)
    module = MultiHead(site(), "decoder_self", 32, Dims(0, 2, 32, 32), 0.0).eval()
    plain = MultiHead(site(backend="dense"), "decoder_self", 32, Dims(0, 2, 32, 32), 0.0).eval()
    plain.load_state_dict(module.state_dict())
    states, at = torch.randn(2, 9, 32), Positions(torch.arange(9), torch.arange(9))
    with torch.no_grad():
        whole = module(states, module.memorize(states, None), at).context
        torch.testing.assert_close(whole, plain(states, plain.memorize(states, None), at).context, rtol=1e-5, atol=1e-5)
        cache = module.allocate(2, 9, states)
        for step in range(9):
            cache = module.append(cache, states[:, step : step + 1])
            where = Positions(torch.tensor([step]), torch.arange(step + 1))
            context = module(states[:, step : step + 1], cache, where).context
            torch.testing.assert_close(context[:, 0], whole[:, step], rtol=1e-4, atol=1e-5)


def passes(kind, role, length, monkeypatch, *, masked=None, device="cpu", dtype=torch.bfloat16):
    """Whether `auto` sent a pass to FlexAttention; its context and its gradients, where there are some, are those of
    the definition. masked: `right`, a row that ends early, and the promise that no other key is hidden; `anywhere`, no
    promise.
    """
    taken = []
    monkeypatch.setattr(
        flex, "attend", lambda *given, real=flex.attend, **more: taken.append(1) or real(*given, **more)
    )
    torch.manual_seed(0)
    module = MultiHead(site(kind, "auto"), role, 64, Dims(0, 2, 64, 64), 0.0).to(device, dtype)
    plain = MultiHead(site(kind, "dense"), role, 64, Dims(0, 2, 64, 64), 0.0).to(device, dtype)
    plain.load_state_dict(module.state_dict())
    states, at = torch.randn(2, length, 64, device=device, dtype=dtype), torch.arange(length, device=device)
    valid = None if masked is None else torch.ones(2, length, dtype=torch.bool, device=device)
    if valid is not None:
        valid[1, length // 2 :] = False
    found, wanted = (
        each(
            states,
            each.memorize(states, valid)._replace(right_padded=masked == "right"),
            Positions(at, at),
            need_weights=False,
        ).context
        for each in (module, plain)
    )
    if valid is not None:  # what a query of padding receives means nothing
        found, wanted = found[valid], wanted[valid]
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2)
    if found.requires_grad:
        upstream = torch.randn_like(wanted)
        for mine, theirs in zip(
            torch.autograd.grad(found, list(module.parameters()), upstream),
            torch.autograd.grad(wanted, list(plain.parameters()), upstream), strict=True,
        ):  # fmt: skip
            assert (mine - theirs).float().norm() <= 2e-2 * theirs.float().norm()
    return bool(taken)


@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize("kind", ["window", "block", "global"])
def test_auto_takes_it_for_long_passes_in_half_precision_with_padding_on_the_right_alone(kind, role, monkeypatch):
    monkeypatch.setattr(flex.fused, "compiles", lambda device: True)
    with torch.no_grad():
        assert passes(kind, role, flex.FROM, monkeypatch)
        assert passes(kind, role, flex.FROM + 30, monkeypatch)
        assert not passes(kind, role, flex.FROM - 1, monkeypatch)
        assert passes(kind, role, flex.FROM, monkeypatch, masked="right")
        assert not passes(kind, role, flex.FROM, monkeypatch, masked="anywhere")
        assert not passes(kind, role, flex.FROM, monkeypatch, dtype=torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize("kind", ["window", "block", "dilated", "global"])
def test_auto_takes_it_on_a_gpu(kind, role, monkeypatch):
    if not flex.fused.compiles(torch.device("cuda")):
        pytest.skip("kernels are interpreted (TRITON_INTERPRET=0 compiles them), or this GPU is too old for them")
    assert passes(kind, role, flex.FROM + 30, monkeypatch, device="cuda")
    assert passes(kind, role, flex.FROM + 30, monkeypatch, device="cuda", masked="right")


@torch.no_grad()
def test_an_encoder_promises_that_its_padding_stands_on_the_right(monkeypatch):
    monkeypatch.setattr(flex.fused, "compiles", lambda device: True)
    monkeypatch.setattr(Ragged, "of", lambda valid: None)  # as off the processor
    monkeypatch.setattr(flex, "FROM", 6)
    seen = []
    monkeypatch.setattr(
        flex, "attend", lambda *given, real=flex.attend, **more: seen.append(more["valid"]) or real(*given, **more)
    )
    window = {"pattern": {"kind": "window", "n": 3}}
    spec = models.parse({
        "kind": "transformer", "layers": 1, "width": 32, "heads": 2, "ffn": 8,
        "attention": {"encoder_self": window, "decoder_self": window},
    })  # fmt: skip
    model = spec.build(Sizes(9, 9, True, 0)).bfloat16().eval()
    valid = torch.arange(6) < torch.tensor([6, 3])[:, None]
    words = torch.randint(4, 9, (2, 6)).masked_fill(~valid, 0)
    memory = model.encode(Source(words, valid))
    assert len(seen) == 1
    assert seen[0] is valid
    model.decode(memory, words)
    assert seen[1:] == [None]


def test_auto_takes_it_neither_without_a_gpu_nor_for_widths_that_it_may_not_know():
    whole = torch.randn(1, 1, flex.FROM, 32).bfloat16()
    assert not flex.pays(whole, flex.FROM, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex.fused, "compiles", lambda device: True)
        assert flex.pays(whole, flex.FROM, True)
        assert not flex.pays(whole, flex.FROM, False)
        assert not flex.pays(whole[:, :, :1], flex.FROM, True)
        assert not flex.pays(whole.float(), flex.FROM, True)
        for width in (8, 24, 256):
            assert not flex.pays(whole.new_zeros(1, 1, flex.FROM, width), flex.FROM, True)


@pytest.mark.parametrize(("changed", "dropout", "gpu"), [
    ({}, 0.0, "flex"),
    ({"kind": {"kind": "bigbird", "n": 8}}, 0.0, None),
    ({"transform": "sparsemax"}, 0.0, None),
    ({}, 0.1, None),
])  # fmt: skip
def test_the_choice_says_so(changed, dropout, gpu):
    choice = choose(site(backend="auto", **changed), "encoder_self", dropout)
    assert choice.backend == "banded"
    assert choice.gpu == gpu
    said = "; on a GPU flex (512 positions or more, half precision, padding on the right)"
    assert (said in str(choice)) == (gpu == "flex")


def test_a_mask_made_without_gradients_serves_a_training():
    flex._blocks.cache_clear()
    with torch.inference_mode():
        mask = flex._blocks(pattern("window").mask_mod("decoder_self"), flex.BLOCK, torch.device("cpu"))
    assert not mask.kv_indices.is_inference()


def test_rows_that_are_not_padded_on_the_right_are_refused():
    states, valid = torch.randn(1, 1, 4, 16), torch.tensor([[False, True, True, True]])
    with torch.no_grad(), pytest.raises(RuntimeError, match="padded on the right alone"):
        flex.attend(states, states, states, rule=None, scale=1.0, valid=valid)


def test_lengths_of_the_same_blocks_share_their_mask():
    rule = pattern("window").mask_mod("encoder_self")
    flex._blocks.cache_clear()
    with torch.no_grad():
        for length in (3, 100, 128, 129):
            states = torch.randn(1, 1, length, 16)
            flex.attend(states, states, states, rule=rule, scale=1.0)
    assert flex._blocks.cache_info().misses == 2


def test_the_mask_skips_blocks_without_a_key():
    mask = flex._blocks(pattern("window").mask_mod("decoder_self"), 8 * flex.BLOCK, torch.device("cpu"))
    assert mask.sparsity() > 70  # of 64 blocks 15 are on or beside the diagonal


def test_a_gradient_needs_a_gpu():
    states = torch.randn(1, 1, 4, 16)
    with pytest.raises(MissingExtraError, match="'flex' needs a CUDA device"):
        flex.attend(states, states, states, rule=None, scale=1.0)


@pytest.mark.parametrize(("changed", "role", "dropout", "why"), [
    ({}, "cross", 0.0, "self-attention alone"),
    ({"transform": "sparsemax"}, "encoder_self", 0.0, "knows softmax, not the transform 'sparsemax'"),
    ({"kind": {"kind": "bigbird", "n": 8}}, "encoder_self", 0.0, "draws its keys"),
    ({"score": "bilinear"}, "encoder_self", 0.0, "not a product"),
    ({}, "encoder_self", 0.1, "no dropout on weights"),
])  # fmt: skip
def test_what_it_cannot_serve_is_said(changed, role, dropout, why):
    with pytest.raises(ValueError, match=f"'flex' cannot serve {role}: .*{why}.*drop `backend: flex`"):
        choose(site(**changed), role, dropout)
