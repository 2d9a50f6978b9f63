"""What a step of decoding reads under a pattern is what its rule allows, and makes the same context."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.backends import picked
from attnbench.attention.backends.base import choose
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import PatternSpec, dense, hashable, patterns
from attnbench.attention.scores.base import scores
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import Dims, Positions
from attnbench.core import native

HEADS = 3
SPARSE = [name for name in patterns.kinds() if "n" in patterns.get(name).model_fields]
TRANSFORMS = (
    "softmax", {"kind": "topk", "k": 2}, "sparsemax", {"kind": "entmax", "alpha": "learned"}, "sigmoid",
    {"kind": "topk", "k": 2, "ties": "index"}, {"kind": "topk", "ratio": 0.5},
)  # fmt: skip


def site(pattern, transform="softmax", **more):
    given = patterns.parse(pattern if pattern == "full" else {"kind": pattern, "n": 4})
    return Site(scores.parse("scaled_dot"), given, transforms.parse(transform), **more)


def module(*given, **more):
    torch.manual_seed(0)
    return MultiHead(site(*given, **more), "decoder_self", 12, Dims(1, HEADS, 12, 12), 0.0).eval()


def contexts(attention, states, *, need_weights=False):
    """Of all steps over these states, one after the other."""
    cache, found = attention.allocate(len(states), states.shape[1] + 2, states), []
    for step in range(states.shape[1]):
        new = states[:, step : step + 1]
        cache = attention.append(cache, new)
        at = Positions(torch.tensor([step]), torch.arange(step + 1))
        found.append(attention(new, cache, at, need_weights=need_weights).context)
    return torch.cat(found, 1)


@pytest.fixture
def picks(monkeypatch):
    """The keys of every call; none is remembered from before."""
    calls = []
    picked.of_cache.cache_clear()
    picked._drawn.cache_clear()
    for name in ("of_cache", "of_sources"):
        made = getattr(picked, name)
        monkeypatch.setattr(picked, name, lambda *given, made=made: calls.append(given) or made(*given))
    return calls


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("n", [1, 2, 5, 8, 40])
def test_what_a_position_sees_is_what_the_rule_allows(kind, n):
    pattern, held = patterns.parse({"kind": kind, "n": n}), torch.arange(2 * HEADS * 45.0).view(2, HEADS, 45, 1)
    for at in range(33):
        rule = pattern.mask_mod("decoder_self", 1, seed=7)
        allowed = dense(rule, Positions(torch.tensor([at]), torch.arange(at + 1)), HEADS)[0, :, 0].expand(HEADS, -1)
        wanted = [[held[row, head, : at + 1, 0][allowed[head]].tolist() for head in range(HEADS)] for row in range(2)]
        found = picked.of_cache(pattern, 1, 7, HEADS, at)
        assert found.there is None
        assert picked.take(held, found.keys).squeeze(-1).tolist() == wanted
        assert isinstance(found.keys, slice) or (found.keys.is_contiguous() and kind in ("random", "bigbird"))


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("compiled", [True, False])
@torch.no_grad()
def test_steps_are_those_of_the_definition(kind, transform, compiled, picks):
    fast, plain = module(kind, transform), module(kind, transform, backend="dense")
    plain.load_state_dict(fast.state_dict())
    states = torch.randn(2, 14, 12)
    wanted = contexts(plain, states)
    assert not picks
    if compiled:
        found = contexts(fast, states)
    else:
        with native.off():
            found = contexts(fast, states)
    assert len(picks) == 14
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", ["bilinear", "additive"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_steps_of_other_scores_and_types(score, dtype, picks):
    first = {"kind": "topk", "k": 2, "ties": "index"}
    fast, plain = (
        MultiHead(
            site("bigbird", first, backend=name)._replace(score=scores.parse(score)),
            "decoder_self", 12, Dims(1, HEADS, 12, 12), 0.0,
        ).eval()
        for name in ("auto", "dense")
    )  # fmt: skip
    plain.load_state_dict(fast.state_dict())
    states = torch.randn(2, 1, 12).expand(2, 9, 12)  # all scores are equal: which are kept is a matter of their order
    if dtype == torch.float64:
        fast, plain, states = fast.double(), plain.double(), states.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found, wanted = contexts(fast, states), contexts(plain, states)
    assert len(picks) == 9
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, wanted, **close)


@pytest.mark.parametrize("filled", [5, 9])
@torch.no_grad()
def test_a_cache_that_is_not_filled_up_to_the_step_is_refused_as_by_the_definition(filled):
    attention, at = module("window"), Positions(torch.tensor([7]), torch.arange(8))
    cache = attention.append(attention.allocate(2, 12, torch.zeros(1)), torch.randn(2, filled, 12))
    for memory in (cache, attention.memorize(torch.randn(2, filled, 12), None)):
        with pytest.raises((RuntimeError, ValueError), match=r"size|shape|broadcast"):
            attention(torch.randn(2, 1, 12), memory, at)


def test_gradients_are_those_of_the_definition(picks):
    fast, plain = module("window", "sparsemax"), module("window", "sparsemax", backend="dense")
    plain.load_state_dict(fast.state_dict())
    memory, states, at = torch.randn(2, 9, 12), torch.randn(2, 1, 12), Positions(torch.tensor([8]), torch.arange(9))
    upstream, slopes = torch.randn(2, 1, 12), []
    for each in (fast, plain):
        context = each(states, each.memorize(memory, None), at).context
        slopes.append(torch.autograd.grad((context * upstream).sum(), list(each.parameters())))
    assert picks
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_an_evaluation_leaves_nothing_that_a_training_cannot_use(picks):
    attention, states, at = module("random"), torch.randn(2, 9, 12), Positions(torch.tensor([8]), torch.arange(9))
    with torch.inference_mode():
        attention(states[:, 8:], attention.memorize(states, None), at)
    attention(states[:, 8:], attention.memorize(states, None), at).context.sum().backward()
    assert picks
    assert attention.project_memory.weight.grad is not None


def test_neither_does_one_over_sources():
    torch.manual_seed(0)
    attention = MultiHead(site("random"), "cross", 12, Dims(1, HEADS, 12, 12), 0.0).eval()
    states, at = torch.randn(2, 9, 12), Positions(torch.tensor([3]), torch.arange(9))
    picked._drawn.cache_clear()
    with torch.inference_mode():
        attention(states[:, 3:4], attention.memorize(states, None), at)
    attention(states[:, 3:4], attention.memorize(states, None), at).context.sum().backward()
    assert picked._drawn.cache_info().hits == 1
    assert attention.project_memory.weight.grad is not None


@pytest.mark.parametrize("role", ["decoder_self", "cross"])
@torch.no_grad()
def test_lists_lie_on_the_processor_whatever_the_default_device(role):
    pattern = patterns.parse({"kind": "random", "n": 2})
    picked.of_cache.cache_clear()
    picked._drawn.cache_clear()
    picked._table.cache_clear()
    with torch.device("meta"):
        own = (
            picked.of_cache(pattern, 0, 0, HEADS, 9)
            if role == "decoder_self"
            else picked.of_sources(pattern, 0, 0, HEADS, 3, picked.Sources((9, 1), 9, None))
        )
    assert own.keys.is_cpu


SOURCES = torch.tensor([[True] * 40, [True] * 33 + [False] * 7, [True] + [False] * 39, [False] * 40])


@pytest.mark.parametrize("n", [1, 4, 60])
@pytest.mark.parametrize("valid", [None, SOURCES, SOURCES.roll(1, 1)], ids=["whole", "padded", "with holes"])
@pytest.mark.parametrize("tables", [True, False])
def test_what_is_drawn_of_a_source_is_what_the_rule_allows(n, valid, tables, monkeypatch):
    monkeypatch.setattr(picked, "_LARGEST", picked._LARGEST if tables else 1)
    picked._drawn.cache_clear()
    monkeypatch.setattr(picked, "_table", picked._table if tables else None)
    pattern, held = patterns.parse({"kind": "random", "n": n}), torch.arange(4 * HEADS * 40.0).view(4, HEADS, 40, 1)
    lengths = torch.full((4,), 40) if valid is None else valid.sum(1)
    for at in (0, 7, 8, 21):
        rule = pattern.mask_mod("cross", 1, lengths=lengths, seed=7)
        allowed = dense(rule, Positions(torch.tensor([at]), torch.arange(40)), HEADS, 4)[:, :, 0]
        allowed = allowed if valid is None else allowed & valid[:, None]
        found = picked.of_sources(pattern, 1, 7, HEADS, at, picked.sources(4, 40, valid))
        keys = picked.take(held, found.keys)
        assert found.keys.is_contiguous()
        there = torch.ones(4, HEADS, 1, n, dtype=torch.bool) if found.there is None else found.there
        for row in range(4):
            for head in range(HEADS):
                kept = there[row, head, 0]
                assert torch.equal(keys[row, head, kept, 0], held[row, head, allowed[row, head], 0])


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("valid", [None, SOURCES], ids=["whole", "padded"])
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_steps_over_a_source_are_those_of_the_definition(transform, valid, beams, picks):
    torch.manual_seed(0)
    fast, plain = (
        MultiHead(site("random", transform, backend=name), "cross", 12, Dims(1, HEADS, 12, 12), 0.0).eval()
        for name in ("auto", "dense")
    )
    plain.load_state_dict(fast.state_dict())
    memory, queries = torch.randn(4, 40, 12), torch.randn(4, beams, 12)
    for step in (0, 3, 9):
        at = Positions(torch.full((beams,), step), torch.arange(40))
        found, wanted = (each(queries, each.memorize(memory, valid), at).context for each in (fast, plain))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(picks) == 3
    fast(queries, fast.memorize(memory, valid), Positions(torch.arange(beams), torch.arange(40)))
    assert len(picks) == (4 if beams == 1 else 3)  # all target positions, as in training, draw together


@torch.no_grad()
def test_a_draw_that_was_loaded_is_followed():
    one, states = module("random"), torch.randn(2, 14, 12)
    torch.manual_seed(5)
    other = MultiHead(site("random"), "decoder_self", 12, Dims(1, HEADS, 12, 12), 0.0).eval()
    before = contexts(other, states)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(contexts(other, states), contexts(one, states))
    assert not torch.allclose(before, contexts(one, states))


@torch.no_grad()
def test_weights_masks_and_full_passes_are_made_of_all_keys(picks):
    attention, states, at = module("window"), torch.randn(2, 9, 12), Positions(torch.tensor([8]), torch.arange(9))
    contexts(attention, states, need_weights=True)
    attention(states[:, 8:], attention.memorize(states, torch.ones(2, 9, dtype=torch.bool)), at)
    attention(states, attention.memorize(states, None), Positions(torch.arange(9), torch.arange(9)))
    attention(states[:, 3:4], attention.memorize(states, None), Positions(torch.tensor([3]), torch.arange(9)))
    assert not picks


@pytest.mark.parametrize(("given", "role", "picks"), [
    (("window",), "decoder_self", True),
    (("full",), "decoder_self", False),
    (("window",), "encoder_self", False),
    (("window", {"kind": "topk_oow", "n": 3}), "decoder_self", False),  # it looks at the scores of all keys
    (("random",), "cross", True),
    (("random", {"kind": "csoftmax"}), "cross", False),  # it asks what each key may still receive
    (("full",), "cross", False),
])  # fmt: skip
def test_which_sites_pick(given, role, picks):
    choice = choose(site(*given), role)
    assert choice.picks is picks
    assert ("steps read the pattern's keys alone" in str(choice)) is picks
    assert not choose(site(*given, backend="dense"), role).picks


class Uneven(PatternSpec):
    """Heads see different numbers of keys, and the first position nothing."""

    kind: str = "uneven"
    held: tuple[int, ...] | list[int] = ()

    def mask_mod(self, role, layer=0, *, lengths=None, seed=0):
        return lambda b, h, q, k: (k <= h) & (q > 0)


class Short(PatternSpec):
    """Written without what only draws need; its rule does not look at the key."""

    kind: str = "short"

    def mask_mod(self, role, layer=0):
        return lambda b, h, q, k: q >= 0


@torch.no_grad()
def test_a_rule_that_does_not_look_at_the_key_allows_all():
    assert picked.of_cache(Short(), 0, 0, 2, 5).keys == slice(0, 6, 1)
    made = [
        MultiHead(site("full", backend=name)._replace(pattern=Short()), "decoder_self", 12, Dims(0, 2, 12, 12), 0.0)
        for name in ("auto", "dense")
    ]
    made[1].load_state_dict(made[0].state_dict())
    states = torch.randn(1, 4, 12)
    torch.testing.assert_close(*(contexts(each.eval(), states) for each in made))


class Wordless(PatternSpec):
    """It draws, and has no layout."""

    kind: str = "wordless"
    drawn = True

    def layout(self, role, layer=0, *, lengths=None, seed=0):
        raise NotImplementedError


def test_a_drawn_pattern_without_a_layout_is_left_to_the_definition():
    assert not picked.draws_all(Wordless())


def test_what_heads_see_in_different_numbers_is_left_to_the_definition():
    assert picked.of_cache(Uneven(), 0, 0, 2, 5) is None
    assert picked.of_cache(Uneven(), 0, 0, 2, 0) is None
    attention = MultiHead(site("full")._replace(pattern=Uneven()), "decoder_self", 12, Dims(0, 2, 12, 12), 0.0).eval()
    assert attention.choice.picks
    assert contexts(attention, torch.randn(1, 4, 12)).shape == (1, 4, 12)


def test_a_pattern_that_cannot_be_remembered_is_left_to_the_definition():
    assert not hashable(Uneven(held=[1]))
    assert not choose(site("full")._replace(pattern=Uneven(held=[1])), "decoder_self").picks


def test_marks_of_far_positions_are_not_remembered():
    pattern: PatternSpec = patterns.parse({"kind": "window", "n": 4})
    picked._kept_of_cache.cache_clear()
    for at in (3, picked._NEAR - 1, picked._NEAR):
        marks = picked.kept_of_cache(pattern, 0, at)
        assert marks.shape == (1, 1, 1, at + 1)
        assert marks.nonzero()[:, 3].tolist() == list(range(max(0, at - 3), at + 1))
    assert picked._kept_of_cache.cache_info().currsize == 2
