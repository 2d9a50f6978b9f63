"""Patterns that draw: n distinct keys of those that exist, the same ones wherever a row is looked at."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnbench.attention import build_pattern
from attnbench.attention.patterns import _drawn
from attnbench.attention.patterns._drawn import Drawn
from attnbench.attention.patterns.base import Extent, dense, patterns
from attnbench.attention.patterns.bigbird import BigBirdSpec
from attnbench.attention.patterns.random import RandomSpec
from attnbench.attention.types import Positions, Role
from attnbench.core import native

LENGTHS = (1, 2, 3, 7, 30, 31, 64, 69, 70)
BUDGETS = (1, 2, 3, 4, 5, 8, 13, 31, 40)
SELF: tuple[Role, ...] = ("encoder_self", "decoder_self")


def fixed_part(n: int, length: int, role: Role) -> Tensor:
    """BigBird without what it draws, by a double loop."""
    window, first = n // 2, n // 4
    causal = role == "decoder_self"
    near = range(1 - window, 1) if causal else range(-(window // 2), (window - 1) // 2 + 1)

    def said(i: int, j: int) -> bool:
        return (j <= i or not causal) and ((window > 0 and j - i in near) or j < first or i < first)

    return torch.tensor([[said(i, j) for j in range(length)] for i in range(length)])


@pytest.mark.parametrize("role", ["encoder_self", "decoder_self", "cross"])
@pytest.mark.parametrize("n", BUDGETS)
def test_a_row_draws_n_keys_or_all_that_there_are(n: int, role: Role):
    for length in LENGTHS:
        mask = build_pattern("random", n=n).dense(length, length, role)
        there = torch.arange(1, length + 1) if role == "decoder_self" else torch.full((length,), length)
        assert torch.equal(mask.sum(1), there.clamp(max=n))
        assert role != "decoder_self" or not mask.triu(1).any()


@pytest.mark.parametrize("role", SELF)
@pytest.mark.parametrize("n", BUDGETS)
def test_bigbird_is_a_window_global_positions_and_a_draw_from_the_rest(n: int, role: Role):
    for length in LENGTHS:
        mask = build_pattern("bigbird", n=n).dense(length, length, role)
        fixed = fixed_part(n, length, role)
        assert (mask & fixed).eq(fixed).all()
        there = torch.ones(length, length).tril().bool() if role == "decoder_self" else torch.ones_like(fixed)
        rest = (there & ~fixed).sum(1)
        assert torch.equal((mask & ~fixed).sum(1), rest.clamp(max=n - n // 2 - n // 4))
        assert not (mask & ~there).any()
        assert mask.any(1).all()


@pytest.mark.parametrize("name", ["random", "bigbird"])
@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
def test_the_rule_is_elementwise(name: str, role: Role):
    """All keys at once, in another order, some of them or one: each is allowed or not by itself."""
    rule = patterns.parse({"kind": name, "n": 4}).mask_mod(role, 1, lengths=torch.tensor([17, 5, 0]), seed=3)
    assert rule is not None
    q, k = torch.arange(17), torch.arange(17)
    whole = dense(rule, Positions(q, k), 2, 3).expand(-1, 2, -1, -1)
    order = torch.randperm(17)
    assert torch.equal(dense(rule, Positions(q, k[order]), 2, 3).expand(-1, 2, -1, -1), whole[..., order])
    assert torch.equal(dense(rule, Positions(q[:3], k[:9]), 2, 3).expand(-1, 2, -1, -1), whole[:, :, :3, :9])
    for row, head, at, key in ((0, 0, 16, 4), (0, 1, 9, 9), (whole.shape[0] - 1, 1, 5, 3)):
        assert bool(rule(*map(torch.tensor, (row, head, at, key)))) == bool(whole[row, head, at, key])


@pytest.mark.parametrize("name", ["random", "bigbird"])
def test_a_step_of_decoding_draws_what_training_drew(name: str):
    for n in (1, 3, 8):
        whole = build_pattern(name, n=n).dense(40, 40, "decoder_self", layer=2, head=1, seed=5)
        for length in range(1, 41):
            row = build_pattern(name, n=n).dense(1, length, "decoder_self", layer=2, head=1, seed=5)
            assert torch.equal(row[0], whole[length - 1, :length])


@pytest.mark.parametrize(
    ("name", "role"), [("random", "encoder_self"), ("random", "cross"), ("bigbird", "encoder_self")]
)
def test_padding_and_batch_change_no_draw(name: str, role: Role):
    lengths = (9, 3, 12)
    rule = patterns.get(name).model_validate({"n": 4}).mask_mod(role, lengths=torch.tensor(lengths), seed=3)
    assert rule is not None
    found = dense(rule, Positions(torch.arange(12), torch.arange(15)), heads=2, rows=3).expand(3, 2, 12, 15)
    for row, length in enumerate(lengths):
        for head in range(2):
            alone = build_pattern(name, n=4).dense(length, length, role, head=head, seed=3)
            assert torch.equal(found[row, head, :length, :length], alone)


def test_sites_layers_heads_and_seeds_draw_for_themselves():
    random = build_pattern("random", n=4)
    draws = [
        random.dense(30, 30, "cross"),
        random.dense(30, 30, "encoder_self"),
        random.dense(30, 30, "encoder_self", layer=1),
        random.dense(30, 30, "encoder_self", head=1),
        random.dense(30, 30, "encoder_self", seed=1),
        build_pattern("random", n=4, seed=7).dense(30, 30, "encoder_self"),
    ]
    for one, two in pairwise(draws):
        assert (one & two).sum() < 0.35 * one.sum()  # 4 of 30 by chance: 0.13
    own = build_pattern("random", n=4, seed=7)
    assert torch.equal(own.dense(9, 9, seed=1), own.dense(9, 9, seed=2))


def test_draws_are_even():
    """Every key about as often, and pairs of neighbours no more often than chance has it."""
    masks = torch.stack([build_pattern("random", n=8).dense(64, 64, seed=seed) for seed in range(40)]).float()
    often = masks.mean((0, 1))
    spread = (0.125 * 0.875 / (40 * 64)) ** 0.5
    assert ((often - 0.125).abs() < 5 * spread).all()
    together = (masks[..., 1:] * masks[..., :-1]).mean()
    assert abs(together - 0.125 * 7 / 63) < 0.002
    rows = (masks[:, 1:] * masks[:, :-1]).mean()
    assert abs(rows - 0.125**2) < 0.002


def test_sources_without_tokens_have_nothing_to_draw():
    rule = patterns.get("random").model_validate({"n": 2}).mask_mod("cross", lengths=torch.tensor([0, 0]))
    assert rule is not None
    assert not dense(rule, Positions(torch.arange(3), torch.arange(2)), rows=2).any()
    assert build_pattern("random", n=2).dense(0, 0).shape == (0, 0)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_compiled_draws_are_those_of_the_definition(data):
    """Number for number, what stands where no key is left to draw included."""
    role: Role = data.draw(st.sampled_from(["encoder_self", "decoder_self", "cross"]))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 70), min_size=1, max_size=4)))
    edges = sorted(data.draw(st.lists(st.integers(-9, 9), min_size=2, max_size=2)))
    extent = data.draw(st.sampled_from([Extent(), Extent(tokens=3), Extent(*edges), Extent(*edges, tokens=5)]))
    n, queries, first = (data.draw(st.integers(*ends)) for ends in ((1, 80), (1, 40), (0, 50)))
    drawn = Drawn(n, data.draw(st.integers(0, 2**32 - 1)), role, data.draw(st.integers(0, 9)), lengths, extent)
    found = drawn.keys(queries, 3, torch.device("cpu"), first)
    with native.off():
        wanted = drawn.keys(queries, 3, torch.device("cpu"), first)
    assert all(map(torch.equal, found, wanted))


def test_turns_in_which_nothing_is_left_to_draw_are_left_out(monkeypatch):
    drawn = []
    monkeypatch.setattr(_drawn, "_mixed", lambda x, mixed=_drawn._mixed: drawn.append(x) or mixed(x))
    once = {}
    for n in (11, 12, 700):
        drawn.clear()
        with native.off():
            mask = build_pattern("random", n=n).dense(12, 12, "encoder_self")
        assert torch.equal(mask.sum(1), torch.full((12,), min(n, 12)))
        once[n] = len(drawn)
    assert once[700] == once[12] == once[11] + 1


def test_a_draw_from_unknown_keys_is_refused():
    for name in ("random", "bigbird"):
        with pytest.raises(ValueError, match="give their lengths"):
            patterns.get(name).model_validate({"n": 2}).mask_mod("encoder_self")


def test_the_list_of_keys_is_what_the_rule_allows():
    lengths = torch.tensor([3, 17])
    cases = [(spec, role) for spec in (RandomSpec(n=5), BigBirdSpec(n=12)) for role in SELF]
    for spec, role in cases:
        given = lengths if role == "encoder_self" else None
        rule = dense(spec.mask_mod(role, 1, lengths=given, seed=7), Positions(torch.arange(17), torch.arange(17)), 2, 2)
        fixed, _, draw = spec.layout(role, 1, lengths=given, seed=7)
        assert draw is not None
        keys, there = draw.keys(17, 2, torch.device("cpu"))
        later = draw.keys(6, 2, torch.device("cpu"), 11)
        assert all(torch.equal(some, every[:, :, 11:]) for some, every in zip(later, (keys, there), strict=True))
        listed = torch.zeros(len(keys), 2, 17, 18, dtype=torch.bool).scatter(-1, torch.where(there, keys, 17), True)
        at = Positions(torch.arange(17), torch.arange(17))
        assert torch.equal((listed[..., :17] | dense(fixed, at)).expand_as(rule), rule)
        assert not (listed[..., :17] & dense(fixed, at)).any()


class Twice(RandomSpec):
    kind: Literal["twice"] = "twice"

    def draw(self, n: int, *others: Any, **more: Any) -> Any:
        return super().draw(2 * n, *others, **more)


def test_how_many_keys_a_parent_draws_does_not_hold_of_another_draw():
    assert RandomSpec(n=4).most("cross") == 4
    assert Twice(n=4).most("cross") is None
