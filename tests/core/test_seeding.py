from __future__ import annotations

import random

import numpy as np
import torch

from attnbench.core.seeding import derive, drawn_apart, seed_everything


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_one_seed_for_all_three():
    seed_everything(1)
    first = draws()
    seed_everything(1)
    assert draws() == first
    seed_everything(2)
    assert all(new != old for new, old in zip(draws(), first, strict=True))


def test_derived_seeds_differ_by_every_name_and_fit_every_generator():
    seeds = [derive(1), derive(2), derive(1, "a"), derive(1, "b"), derive(1, "a", 1), derive(1, "a", 2), derive(11)]
    assert len(set(seeds)) == len(seeds)
    for seed in seeds:
        assert 0 <= seed < 2**63
        seed_everything(seed)


def test_derived_seeds_stay_what_they_were():
    # half-finished runs go on with them
    assert derive(7, "order", 3) == 8447054841603909260


def test_what_is_drawn_apart_moves_nothing_that_is_drawn_later():
    seed_everything(3)
    wanted = torch.rand(2)
    seed_everything(3)
    with drawn_apart("a"):
        first = torch.rand(2)
    assert torch.equal(torch.rand(2), wanted)
    assert torch.initial_seed() == 3
    with drawn_apart("a"):
        assert torch.equal(torch.rand(2), first)
    with drawn_apart("b"):
        assert not torch.equal(torch.rand(2), first)
    assert not torch.equal(first, wanted)
