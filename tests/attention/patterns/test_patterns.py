"""The laws of a pattern, for every member: a rule is one thing in training, in a decode step and elementwise."""

from __future__ import annotations

import pytest
import torch
from members import filled

from attnbench.attention.patterns.base import causal, dense, patterns
from attnbench.attention.types import ROLES, Positions

LENGTH, HEADS = 7, 2
CASES = [
    pytest.param(filled(patterns.get(kind), 3, role), role, id=f"{role}-{kind}")
    for role in ROLES
    for kind in patterns.kinds()
    if role in patterns.get(kind).roles
]


def whole(rule, queries=LENGTH, keys=LENGTH):
    """The rule at every place, one call a place."""
    found = torch.zeros(HEADS, queries, keys, dtype=torch.bool)
    for h in range(HEADS):
        for i in range(queries):
            for j in range(keys):
                found[h, i, j] = bool(rule(*(torch.tensor(value) for value in (0, h, i, j))))
    return found


def arange(queries, keys):
    return Positions(torch.arange(queries), torch.arange(keys))


@pytest.mark.parametrize(("pattern", "role"), CASES)
def test_dense_is_the_rule_at_every_place(pattern, role):
    rule = pattern.mask_mod(role, lengths=torch.tensor([LENGTH]))
    if rule is None:
        assert role != "decoder_self"  # someone must hide the future
        return
    assert torch.equal(dense(rule, arange(LENGTH, LENGTH), HEADS)[0].expand(HEADS, -1, -1), whole(rule))


@pytest.mark.parametrize(("pattern", "role"), CASES)
def test_a_decode_row_is_the_training_row(pattern, role):
    rule = pattern.mask_mod(role, lengths=torch.tensor([LENGTH]))
    if role != "decoder_self" or rule is None:
        return
    full = dense(rule, arange(LENGTH, LENGTH), HEADS).expand(1, HEADS, -1, -1)
    for at in range(LENGTH):
        row = dense(rule, Positions(torch.tensor([at]), torch.arange(at + 1)), HEADS).expand(1, HEADS, -1, -1)
        assert torch.equal(row[:, :, 0], full[:, :, at, : at + 1])
        assert not full[:, :, at, at + 1 :].any()


@pytest.mark.parametrize(("pattern", "role"), CASES)
def test_no_row_is_empty(pattern, role):
    rule = pattern.mask_mod(role, lengths=torch.tensor([LENGTH]))
    assert rule is None or whole(rule).any(-1).all()


def test_causal_is_the_lower_triangle():
    assert torch.equal(whole(causal)[0], torch.ones(LENGTH, LENGTH).tril().bool())


def test_full_restricts_nothing_and_takes_no_budget():
    full = patterns.parse("full")
    assert full.mask_mod("encoder_self") is None
    assert full.mask_mod("cross") is None
    assert full.mask_mod("decoder_self") is causal
    assert all(type(full).from_budget(4, role) is None for role in ROLES)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("pattern", "role"), [case for case in CASES if type(case.values[0]).from_budget(3, case.values[1])]
)
def test_an_ordinary_row_has_as_many_keys_as_its_budget(pattern, role, n):
    """None has more; rows at either end, and those of a block that look back alone, have fewer."""
    length = 100
    rule = type(pattern).from_budget(n, role).mask_mod(role, lengths=torch.tensor([length]))
    kept = dense(rule, arange(length, length), HEADS).sum(-1)
    assert bool((kept[:, :, 40:60].amax(-1) == n).all())


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize(("pattern", "role"), CASES)
def test_no_row_has_more_keys_than_it_says(pattern, role, n):
    pattern = type(pattern).from_budget(n, role) or pattern
    most, length = pattern.most(role), 20
    if most is not None:
        rule = pattern.mask_mod(role, lengths=torch.tensor([length]))
        assert int(dense(rule, arange(length, length), HEADS).sum(-1).max()) <= most
