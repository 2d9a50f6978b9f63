"""The banded path gives the contexts and gradients of the definition, for every pattern that has a layout."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.attention.backends import banded, sampled
from attnbench.attention.backends.base import choose, chosen
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import Extent, Layout, dense, patterns
from attnbench.attention.patterns.random import nowhere
from attnbench.attention.reference import attend
from attnbench.attention.scores.base import scores
from attnbench.attention.scores.dot import ScaledDot
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import Dims, Positions

HEADS, WIDTH = 2, 3
SPARSE = [kind for kind in patterns.kinds() if patterns.get(kind).sparse and "n" in patterns.get(kind).model_fields]
TRANSFORMS = [
    "softmax",
    "sigmoid",
    "sparsemax",
    "entmax15",
    {"kind": "entmax", "alpha": 1.3},
    {"kind": "entmax", "alpha": "learned"},
    {"kind": "topk", "k": 2},
    {"kind": "topk", "ratio": 0.4},
]


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both(pattern, role, lengths, transform="softmax", seed=0, spoil=None, dtype=torch.float64):
    """(context, gradients) of the banded path, in this type, and of the definition, in float64."""
    dims = Dims(layer=1, heads=HEADS, query_width=WIDTH, key_width=WIDTH)
    longest, rows = max(lengths), len(lengths)
    kept = torch.tensor(lengths)
    valid = torch.arange(longest) < kept[:, None]
    given = None if role == "decoder_self" else kept
    found = []
    for fast in (True, False):
        weigh, kind = transforms.parse(transform).build(dims), dtype if fast else torch.float64
        parameters = list(weigh.to(kind).parameters()) if isinstance(weigh, torch.nn.Module) else []
        drawn = [draw(rows, HEADS, longest, WIDTH, seed=seed + place).to(dtype) for place in range(3)]
        inputs = [each.to(kind).requires_grad_() for each in drawn]
        query, keys, values = inputs
        if spoil is not None:
            keys, values = (torch.where(valid[:, None, :, None], states, spoil) for states in (keys, values))
        if fast:
            context = banded.attend(
                query, keys, values, score=ScaledDot(dims),
                weigh=lambda raw, open_, weigh=weigh: weigh(raw, valid=open_),
                layout=pattern.layout(role, 1, lengths=given, seed=seed), scale=ScaledDot(dims).scale, valid=valid,
                causal=role == "decoder_self",
            )  # fmt: skip
        else:
            at = Positions(torch.arange(longest), torch.arange(longest))
            rule = pattern.mask_mod(role, 1, lengths=given, seed=seed)
            masked = dense(rule, at, HEADS, rows)
            context, _ = attend(
                query, keys, values, score=ScaledDot(dims), transform=weigh, positions=at,
                rule=lambda b, h, q, k, masked=masked: masked, valid=valid,
            )  # fmt: skip
        wanted = draw(*context.shape, seed=seed + 9).to(dtype).to(kind)
        gradients = torch.autograd.grad((context * wanted).sum(), [*inputs, *parameters])
        found.append([context, *gradients])
    return found


def same(found):
    for fast, definition in zip(*found, strict=True):
        close = 1e-10 if fast.dtype == torch.float64 else 2e-5
        torch.testing.assert_close(fast.double(), definition, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize("kind", SPARSE)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_it_equals_the_definition(kind, role, dtype, data):
    """In float32 by lists of keys, but for blocks and many keys, in float64 by tiles."""
    n = data.draw(st.integers(1, 40), label="n")
    fields = {"dilation": data.draw(st.integers(1, 4))} if kind == "dilated" else {}
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=3), label="lengths")
    seed = data.draw(st.integers(0, 99))
    same(both(patterns.parse({"kind": kind, "n": n, **fields}), role, lengths, seed=seed, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("kind", SPARSE)
def test_any_transform_stands_behind_any_pattern(kind, transform, dtype):
    for role in ("encoder_self", "decoder_self"):
        same(both(patterns.parse({"kind": kind, "n": 8}), role, [70, 33], transform, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SPARSE)
def test_tied_scores_are_kept_or_broken_as_by_the_definition(kind, dtype, monkeypatch):
    monkeypatch.setattr(f"{__name__}.draw", lambda *shape, seed: torch.ones(*shape, dtype=torch.float64))
    same(both(patterns.parse({"kind": kind, "n": 8}), "encoder_self", [70], {"kind": "topk", "k": 2}, dtype=dtype))
    if not patterns.get(kind).drawn:
        broken = {"kind": "topk", "k": 2, "ties": "index"}
        same(both(patterns.parse({"kind": kind, "n": 8}), "encoder_self", [70], broken, dtype=dtype))


@pytest.mark.parametrize("kind", SPARSE)
def test_a_row_of_padding_alone_is_zero_and_leaves_no_nan(kind):
    for dtype in (torch.float32, torch.float64):
        found = both(patterns.parse({"kind": kind, "n": 4}), "encoder_self", [40, 0], dtype=dtype)
        same(found)
        assert not found[0][0][1].any()


@pytest.mark.parametrize("kind", SPARSE)
def test_memory_is_linear_in_length(kind):
    """Scores of 16 times the length are at most 20 times as many, tiles at the ends included."""
    made = []

    def weigh(raw, open_):
        made.append(raw.numel())
        return raw.masked_fill(~open_, 0.0)

    pattern = patterns.parse({"kind": kind, "n": 8})
    for scale in (None, 1.0):  # in tiles, and by lists
        made.clear()
        for length in (128, 2048):
            states = torch.zeros(1, HEADS, length, WIDTH)
            layout = pattern.layout("encoder_self", lengths=torch.tensor([length]))
            banded.attend(
                states, states, states, score=ScaledDot(Dims()), weigh=weigh, layout=layout, scale=scale, causal=True
            )
        assert made[1] <= 20 * made[0]


class Below(NamedTuple):
    """A draw of one's own, with keys that there are not where it says so."""

    n: int

    def keys(self, queries, heads, device, first=0):
        keys = torch.arange(-1, self.n - 1, device=device).expand(1, heads, queries, -1)
        return keys, keys >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_drawn_key_that_is_not_there_may_be_any_number(dtype):
    states = draw(1, HEADS, 5, WIDTH, seed=0).to(dtype)
    found = banded.attend(
        states, states, states, score=ScaledDot(Dims()), weigh=lambda raw, open_: raw.masked_fill(~open_, 0.0),
        layout=Layout(nowhere, Extent(), Below(3)), scale=1.0,
    )  # fmt: skip
    torch.testing.assert_close(found, states @ states[:, :, :2].mT @ states[:, :, :2])


@pytest.mark.parametrize("kind", SPARSE)
def test_lists_lie_where_the_keys_do_whatever_the_default_device(kind):
    states = draw(1, HEADS, 40, WIDTH, seed=0).float()
    layout = patterns.parse({"kind": kind, "n": 8}).layout("encoder_self", lengths=torch.tensor([40]))
    given = {"score": ScaledDot(Dims()), "weigh": lambda raw, open_: raw.masked_fill(~open_, 0.0), "scale": 1.0}
    wanted = banded.attend(states, states, states, layout=layout, **given)
    with torch.device("meta"):
        found = banded.attend(states, states, states, layout=layout, **given)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", SPARSE)
def test_under_autocast_scores_stay_in_float32(kind, monkeypatch):
    made, plain = [], banded.attend

    def attend(*given, weigh, **named):
        return plain(*given, weigh=lambda raw, open_: made.append(raw.detach()) or weigh(raw, open_), **named)

    monkeypatch.setattr(banded, "attend", attend)
    module = MultiHead(
        site(kind, n=8, backend="banded"), "encoder_self", 8, Dims(heads=HEADS, query_width=8, key_width=8), 0.0
    )
    states, at = draw(2, 200, 8, seed=1).float(), Positions(torch.arange(200), torch.arange(200))
    with torch.autocast("cpu", torch.bfloat16):
        memory = module.memorize(states, None)
        quick = module(states, memory, at).context
        told = module(states, memory, at, need_weights=True).context
    assert quick.dtype == told.dtype
    torch.testing.assert_close(quick, told, rtol=0, atol=0.02)
    assert made
    assert all(raw.dtype == torch.float32 and not torch.equal(raw, raw.bfloat16().float()) for raw in made)


def site(pattern="window", transform="softmax", score="scaled_dot", backend="auto", n=4, **fields):
    pattern = patterns.parse({"kind": pattern, "n": n} if pattern != "full" else pattern)
    return Site(scores.parse(score), pattern, transforms.parse(transform), backend=backend, **fields)


@pytest.mark.parametrize(
    ("asked", "role", "why"),
    [
        (site("full"), "encoder_self", "leaves no key out"),
        (site("full"), "cross", "leaves no key out"),
        (site("bigbird"), "cross", "what is drawn alone"),
        (site(score="additive"), "encoder_self", "the score 'additive'"),
        (site(transform={"kind": "topk_oow", "n": 4}), "encoder_self", "the scores of all keys"),
        (site("bigbird", {"kind": "topk", "k": 2, "ties": "index"}), "encoder_self", "ties by position"),
    ],
)
def test_what_it_cannot_serve_is_dense_and_says_why(asked, role, why):
    assert choose(asked, role).backend == "dense"
    assert why in choose(asked, role).why
    if role == "cross" or not asked.pattern.sparse:  # a default for all sites, and for a budget of `inf`, too
        assert choose(asked._replace(backend="banded"), role).backend == "dense"
        return
    with pytest.raises(ValueError, match=why):
        choose(asked._replace(backend="banded"), role)


def test_the_choice_says_from_which_length_on_it_pays():
    few, many = choose(site(n=4), "encoder_self"), choose(site(n=64), "encoder_self")
    assert few.backend == many.backend == "banded"
    assert 1 < few.since < many.since
    assert 1 < few.listed < few.since
    assert few.listed < many.listed < many.since
    told = f"from {few.since} positions on ({few.listed} by compiled code); on a GPU flex (512 "
    assert str(few).startswith(f"banded: the pattern 'window', {told}")
    assert choose(site(backend="dense"), "encoder_self").backend == "dense"
    assert choose(site(backend="banded"), "encoder_self").since == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_takes_the_path_that_pays_and_tells_weights_by_the_definition(dtype, monkeypatch):
    calls = []
    plain = banded.attend
    monkeypatch.setattr(banded, "attend", lambda *args, **named: calls.append(1) or plain(*args, **named))
    dims = Dims(heads=HEADS, query_width=8, key_width=8)
    module = MultiHead(site(), "encoder_self", 8, dims, 0.0).to(dtype).eval()
    listed = sampled.serves(torch.zeros(1, 1, 1, 1, dtype=dtype))
    since = module.choice.listed if listed else module.choice.since
    for length, taken in ((since - 1, 0), (since, 1)):
        states = draw(2, length, 8, seed=1).to(dtype)
        valid = torch.arange(length) < torch.tensor([[length], [5]])
        at = Positions(torch.arange(length), torch.arange(length))
        memory = module.memorize(states, valid)
        quick = module(states, memory, at)
        assert len(calls) == taken
        assert quick.weights is None or not taken
        told = module(states, memory, at, need_weights=True)
        assert len(calls) == taken
        torch.testing.assert_close(quick.context, told.context, rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-6)
        assert told.weights.shape == (2, HEADS, length, length)


@pytest.mark.parametrize("transform", ["softmax", "entmax15", {"kind": "topk", "k": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_drawn_from_a_source_is_looked_up_where_that_pays(dtype, transform, monkeypatch):
    calls = []
    plain = banded.attend
    monkeypatch.setattr(banded, "attend", lambda *args, **named: calls.append(1) or plain(*args, **named))
    dims = Dims(heads=HEADS, query_width=8, key_width=8)
    module = MultiHead(site("random", transform), "cross", 8, dims, 0.0).to(dtype).eval()
    listed = sampled.serves(torch.zeros(1, 1, 1, 1, dtype=dtype))
    since = module.choice.listed if listed else module.choice.since
    queries = draw(3, 7, 8, seed=2).to(dtype)
    for length, first, taken in ((since - 1, 0, 0), (since, 0, 1), (since, 1, 0)):
        calls.clear()
        states = draw(3, length, 8, seed=1).to(dtype).requires_grad_()
        valid = torch.arange(length) < torch.tensor([[length], [3], [0]])  # a source may have fewer keys than are drawn
        at = Positions(torch.arange(first, first + 7), torch.arange(length))
        found = []
        for weights in (False, True):
            context = module(queries, module.memorize(states, valid), at, need_weights=weights).context
            found.append([context, *torch.autograd.grad(context.square().sum(), states)])
        assert len(calls) == taken
        for ours, wanted in zip(*found, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-10 if dtype == torch.float64 else 1e-6)


def test_a_model_says_what_each_site_goes_through():
    dims = Dims(heads=HEADS, query_width=8, key_width=8)
    model = torch.nn.ModuleList(
        [MultiHead(site(), "encoder_self", 8, dims, 0.0), MultiHead(site("full"), "cross", 8, dims, 0.0)]
    )
    told = chosen(model)
    assert told["encoder_self"].startswith("banded: the pattern 'window', from ")
    assert told["cross"] == "dense: the pattern 'full' leaves no key out; on a GPU sdpa"


@pytest.mark.parametrize("kind", SPARSE)
def test_a_site_is_built_without_memory(kind):
    with torch.device("meta"):
        module = MultiHead(site(kind), "encoder_self", 8, Dims(heads=HEADS, query_width=8, key_width=8), 0.0)
    assert module.choice.backend == "banded"
