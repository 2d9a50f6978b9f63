"""Rows that every transform is held against its oracles on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor


class Case(NamedTuple):
    """scores in float64; valid: None or one mask for all; every row has a valid key."""

    scores: Tensor
    valid: Tensor | None = None

    @property
    def masked(self) -> Tensor:
        return self.scores if self.valid is None else self.scores.masked_fill(~self.valid, -torch.inf)


def _draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def _mask(seed: int, *shape: int) -> Tensor:
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., 0] |= ~mask.any(-1)
    return mask


CASES: dict[str, Callable[[], Case]] = {
    "random": lambda: Case(_draw(0, 60, 9)),
    "flat": lambda: Case(_draw(1, 60, 17, scale=0.1)),
    "steep": lambda: Case(_draw(2, 60, 17, scale=10)),
    "one key": lambda: Case(_draw(3, 5, 1)),
    "two keys": lambda: Case(_draw(4, 20, 2)),
    "tied": lambda: Case((_draw(5, 60, 9) * 2).round() / 2),
    "equal": lambda: Case(torch.full((3, 7), 2.5, dtype=torch.float64)),
    "masked": lambda: Case(_draw(6, 60, 12), _mask(7, 60, 12)),
    "tied and masked": lambda: Case((_draw(8, 60, 12) * 2).round() / 2, _mask(9, 60, 12)),
    "huge": lambda: Case(_draw(10, 30, 33, scale=1e4)),
    "far from zero": lambda: Case(_draw(11, 30, 33) + 1e4),
    "long": lambda: Case(_draw(12, 6, 2048)),
    "long, flat": lambda: Case(_draw(13, 4, 2048, scale=1e-3)),
    "long, steep and masked": lambda: Case(_draw(14, 6, 2048, scale=20), _mask(15, 6, 2048)),
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


@pytest.fixture
def hardly_reaching() -> Callable[[int, float], Tensor]:
    """hardly_reaching(keys, excess): a row in float32 whose threshold, for that alpha - 1, lies among all its scores
    but the best: a search that ends once its threshold hardly moves leaves them a part of its mass."""

    def made(keys: int, excess: float) -> Tensor:
        scores = 9e-7 * torch.rand(1, 1, 1, keys, generator=torch.Generator().manual_seed(keys))
        scores[..., 0] = 1 / excess
        return scores

    return made


@pytest.fixture
def agree() -> Callable[..., None]:
    """agree(ours, oracle, case, tolerance): equal weights and, away from kinks, equal gradients of a random mix.

    ours takes scores and valid, the oracle scores with -inf at masked keys. A row is away from kinks when no weight
    lies between 0 and `kink`; at least `share` of the rows must be.
    """

    def check(
        ours: Callable, oracle: Callable, case: Case, tolerance: float, *, kink: float = 1e-7, share: float = 0.5
    ) -> None:
        upstream = _draw(99, *case.scores.shape)
        left, right = case.scores.clone().requires_grad_(), case.masked.clone().requires_grad_()
        found, wanted = ours(left, valid=case.valid), oracle(right)
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
        (found * upstream).sum().backward()
        (wanted * upstream).sum().backward()
        assert left.grad is not None
        assert right.grad is not None
        smooth = (torch.where(wanted > 0, wanted, 1.0).amin(-1) > kink) & ((found > kink) == (wanted > kink)).all(-1)
        assert smooth.double().mean() >= share, "too few rows away from kinks to say anything"
        torch.testing.assert_close(left.grad[smooth], right.grad[smooth], rtol=tolerance, atol=tolerance)

    return check
