"""Dropout of weights in the Triton kernels: as often as asked, independently, the same wherever it is asked for."""

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
TILE = (QUERIES, KEYS) if fused.interpreted() else (32, 64)


@triton.jit
def _draw(out, seed, queries, keys, rate, M: tl.constexpr, N: tl.constexpr, GIVEN: tl.constexpr):
    head, first_query, first_key = tl.program_id(0).to(tl.int64), tl.program_id(1) * M, tl.program_id(2) * N
    key = tl.load(seed + head).to(tl.uint64) if GIVEN else drawn_for(seed, head, True)
    row, column = first_query + tl.arange(0, M)[:, None], first_key + tl.arange(0, N)[None, :]
    tl.store(out + (head * queries + row) * keys + column, kept_in(key, first_query, first_key, keys, rate, M, N))


def drawn(rate, seed=1, heads=HEADS, tile=TILE, given=False):
    """What weights of [heads, QUERIES, KEYS] are multiplied by. given: seed has the bits of each head."""
    device = "cpu" if fused.interpreted() else "cuda"
    out = torch.empty(heads, QUERIES, KEYS, device=device)
    grid = (heads, QUERIES // tile[0], KEYS // tile[1])
    _draw[grid](out, torch.tensor(seed, device=device).view(-1), QUERIES, KEYS, rate, *tile, given)
    return out.cpu()


def beyond(products):
    """By how many standard deviations the sum of these products of mean 0 and variance 1 lies off 0, in the worst
    head."""
    return float(products.double().flatten(1).sum(1).abs().max()) / products[0].numel() ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1 << 40])
def test_what_is_dropped_is_as_much_as_asked_and_knows_nothing_of_its_neighbours(rate, seed):
    kept = drawn(rate, seed)
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)])
    off = ((kept == 0).float() - rate) / (rate * (1 - rate)) ** 0.5
    assert beyond(off) < 4.5
    for down, right in ((0, 1), (0, 2), (0, 32), (0, 256), (1, 0), (2, 0), (64, 0), (128, 0), (1, 1), (64, 64)):
        assert beyond(off[:, down:, right:] * off[:, : QUERIES - down, : KEYS - right]) < 4.5
    assert beyond(off[1:] * off[:-1]) < 4.5  # heads
    for dim in (1, 2):  # of every row, and of every column, as many as of independent ones
        counts = off.sum(dim) / off.shape[dim] ** 0.5
        assert beyond((counts**2 - 1) / 2**0.5) < 4.5


def test_another_seed_draws_others_even_the_next_one_for_the_head_before():
    one, two = drawn(0.5, 7) == 0, drawn(0.5, 8) == 0
    for first, second in ((one, two), (one[1:], two[:-1]), (one[:-1], two[1:])):
        assert float((first == second).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_a_head_does_not_share_its_draws_with_another_in_other_places():
    """Two offsets are always some places apart, in somebody's steps; heads of one step would share all the rest."""
    step, other, places = 12345, 67891, 3
    one, same, apart = (
        drawn(0.5, [each], 1, given=True).flatten() == 0
        for each in (step, step + (places * step << 32), other + (places * step << 32))
    )
    assert torch.equal(one[places:], same[:-places])
    assert float((one[places:] == apart[:-places]).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_blocks_draw_what_the_whole_draws_there():
    assert torch.equal(drawn(0.3, heads=2, tile=(32, 64)), drawn(0.3, heads=2, tile=(QUERIES, KEYS // 2)))


def test_no_rate_drops_nothing():
    assert bool((drawn(0.0, heads=1) == 1).all())
