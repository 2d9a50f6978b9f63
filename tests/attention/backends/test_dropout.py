"""What dropout of weights draws in the Triton kernels: as often as asked, independently, the same wherever asked for."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.backends import fused

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
dropout = pytest.importorskip("attnbench.attention.backends._dropout")
drawn_for, kept_in = dropout.drawn_for, dropout.kept_in

pytestmark = pytest.mark.skipif(
    not fused.interpreted() and not torch.cuda.is_available(), reason="TRITON_INTERPRET is off and there is no GPU"
)
HEADS, QUERIES, KEYS = 8, 256, 512


@triton.jit
def _draw(out, seed, keys, rate, first_query, first_key, M: tl.constexpr, N: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    kept = kept_in(drawn_for(seed, head, True), first_query, first_key, keys, rate, M, N)
    tl.store(out + (head * M + tl.arange(0, M)[:, None]) * N + tl.arange(0, N)[None, :], kept)


def drawn(rate, seed=1, first=(0, 0), shape=(QUERIES, KEYS), heads=HEADS):
    device = "cpu" if fused.interpreted() else "cuda"
    out = torch.empty(heads, *shape, device=device)
    _draw[(heads,)](out, torch.tensor([seed], device=device), KEYS, rate, *first, *shape)
    return out.cpu()


def beyond(products):
    """By how many standard deviations the sum of these products of mean 0 and variance 1 lies off 0."""
    return abs(float(products.double().sum())) / products.numel() ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1 << 40])
def test_what_is_dropped_is_as_much_as_asked_and_knows_nothing_of_its_neighbours(rate, seed):
    kept = drawn(rate, seed)
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
    off = ((kept == 0).float() - rate) / (rate * (1 - rate)) ** 0.5
    assert beyond(off) < 4
    for down, right in ((0, 1), (0, 2), (0, 32), (0, 256), (1, 0), (2, 0), (64, 0), (128, 0), (1, 1), (64, 64)):
        assert beyond(off[:, down:, right:] * off[:, : QUERIES - down, : KEYS - right]) < 4
    assert beyond(off[1:] * off[:-1]) < 4  # heads
    for dim in (1, 2):  # of every row, and of every column, as many as of independent ones
        counts = off.sum(dim) / off.shape[dim] ** 0.5
        assert beyond((counts**2 - 1) / 2**0.5) < 4


def test_another_seed_draws_others_even_the_next_one_for_the_head_before():
    one, two = drawn(0.5, 7) == 0, drawn(0.5, 8) == 0
    for first, second in ((one, two), (one[1:], two[:-1]), (one[:-1], two[1:])):
        assert float((first == second).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_a_block_draws_what_the_whole_draws_there():
    assert torch.equal(drawn(0.3, first=(64, 128), shape=(32, 64)), drawn(0.3)[:, 64:96, 128:192])


def test_no_rate_drops_nothing():
    assert bool((drawn(0.0, heads=1) == 1).all())
