from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.attention.transforms.topk import TopKSpec
from attnbench.attention.types import Dims
from attnbench.core import native
from attnbench.core.files import dump_yaml, parse_yaml


def built(**fields):
    return TopKSpec(**fields).build(Dims(0, 1, 1, 1))


def topk(scores, *, valid=None, keep=None, upper=None, **fields):
    return built(**fields)(scores, valid=valid, keep=keep, upper=upper)


def kept_by_hand(row: list[float], valid: list[bool], k: int, ties: str = "threshold", keep: list[bool] | None = None):
    """Indices that a row keeps, by sorting in Python."""
    living = [j for j, ok in enumerate(valid) if ok]
    ranked = sorted(living, key=lambda j: (-row[j], j))
    best = ranked[:k]
    if ties == "threshold" and best:
        best = [j for j in living if row[j] >= row[best[-1]]]
    extra = [j for j in living if keep is not None and keep[j]]
    return sorted(set(best) | set(extra))


def softmax_by_hand(row: list[float], kept: list[int]) -> list[float]:
    top = max((row[j] for j in kept), default=0.0)
    masses = {j: math.exp(row[j] - top) for j in kept}
    total = sum(masses.values())
    return [masses[j] / total if j in masses else 0.0 for j in range(len(row))]


@pytest.mark.parametrize("ties", ["threshold", "index"])
@pytest.mark.parametrize("k", [1, 2, 8, 300, 5000])
def test_equals_sorting_by_hand(case, k, ties):
    found = topk(case.scores, valid=case.valid, k=k, ties=ties)
    valid = torch.ones_like(case.scores, dtype=torch.bool) if case.valid is None else case.valid
    for row, mask, weights in list(zip(case.scores, valid, found, strict=True))[:8]:
        kept = kept_by_hand(row.tolist(), mask.tolist(), k, ties)
        wanted = torch.tensor(softmax_by_hand(row.tolist(), kept), dtype=torch.float64)
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 4])
def test_values_and_gradients_equal_a_masked_softmax(case, agree, k):
    def oracle(z):
        kth = z.detach().sort(dim=-1, descending=True).values[..., min(k, z.shape[-1]) - 1 :][..., :1]
        return torch.softmax(z.masked_fill(z < kth, -torch.inf), -1)

    agree(lambda z, valid: topk(z, valid=valid, k=k), oracle, case, 1e-8, kink=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_row_keeps_what_sorting_keeps(data):
    length = data.draw(st.integers(1, 12))
    row = data.draw(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), min_size=length, max_size=length))
    valid = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    keep = data.draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
    k, ties = data.draw(st.integers(1, 14)), data.draw(st.sampled_from(["threshold", "index"]))
    found = topk(
        torch.tensor(row, dtype=torch.float64),
        valid=torch.tensor(valid),
        keep=None if keep is None else torch.tensor(keep),
        k=k,
        ties=ties,
    )
    wanted = softmax_by_hand(row, kept_by_hand(row, valid, k, ties, keep))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)


def test_ties_keep_more_by_threshold_and_exactly_k_by_index():
    scores = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    assert (topk(scores, k=2) > 0).tolist() == [True, True, True, True, False]
    assert (topk(scores, k=2, ties="index") > 0).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("k", [0, None])
def test_selection_is_off(k):
    scores = torch.randn(3, 5)
    torch.testing.assert_close(topk(scores, k=k), torch.softmax(scores, -1))


def test_padding_is_not_counted_by_k():
    scores = torch.tensor([5.0, 4.0, 1.0, 0.0])
    weights = topk(scores, valid=torch.tensor([False, False, True, True]), k=2)
    assert (weights > 0).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("ratio", "valid", "kept"), [
    (0.1, 30, 3), (0.07, 100, 7), (0.14, 50, 7),
    (0.1, 31, 4), (0.1, 70, 7), (0.7, 10, 7), (1 / 3, 3, 1), (0.5, 1, 1), (1.0, 9, 9), (1e-6, 40, 1),
    (0.3, 10, 3),
])  # fmt: skip
def test_ratio_of_the_valid_keys_rounded_up(ratio, valid, kept):
    scores = torch.randn(2, valid + 13, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(valid + 13) < valid
    assert (topk(scores, valid=mask, ratio=ratio) > 0).sum(-1).tolist() == [kept, kept]
    assert (topk(scores, valid=mask, ratio=ratio, ties="index") > 0).sum(-1).tolist() == [kept, kept]


class _NothingWider(TorchDispatchMode):
    """A device that has no float64, as Apple's GPUs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        assert not (isinstance(found, torch.Tensor) and found.dtype == torch.float64), func
        return found


def test_ratio_needs_no_float64():
    scores = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    with _NothingWider():
        assert (topk(scores, ratio=0.07) > 0).sum(-1).tolist() == [7, 7]


def test_ratio_is_compiled_whole():
    scores = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    found = torch.compile(built(ratio=0.07), backend="eager", fullgraph=True)(scores)
    assert (found > 0).sum(-1).tolist() == [7, 7]


def test_ratio_counts_each_row_by_itself_and_never_below_at_least():
    scores = torch.randn(1, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    kept = (topk(scores, valid=causal, ratio=0.25, at_least=2) > 0).sum(-1).flatten().tolist()
    assert kept == [min(i, max(2, math.ceil(i / 4))) for i in range(1, 13)]


def test_at_least_holds_where_the_ratio_gives_fewer():
    scores = torch.arange(20.0)
    for ties in ("threshold", "index"):
        assert topk(scores, ratio=0.1, at_least=5, ties=ties).nonzero().flatten().tolist() == [15, 16, 17, 18, 19]
        assert int((topk(scores, ratio=0.1, at_least=30, ties=ties) > 0).sum()) == 20


def test_ratio_equals_k_on_a_full_row_and_ignores_padding():
    scores = torch.randn(4, 20, dtype=torch.float64)
    padded = torch.cat([scores, torch.full((4, 9), 50.0)], -1)
    mask = torch.arange(29) < 20
    with native.off():  # a ratio is made by torch operations: one path, so equal to the last bit
        assert torch.equal(topk(scores, ratio=0.3), topk(scores, k=6))
        assert torch.equal(topk(padded, valid=mask, ratio=0.3)[:, :20], topk(scores, ratio=0.3))


def test_keep_joins_the_best_if_valid():
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0])
    weights = topk(scores, k=2, valid=torch.tensor([1, 1, 1, 1, 0]).bool(), keep=torch.tensor([0, 0, 0, 1, 1]).bool())
    assert (weights > 0).tolist() == [True, True, False, True, False]
    torch.testing.assert_close(weights[[0, 1, 3]], torch.softmax(scores[[0, 1, 3]], -1))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"upper": torch.ones(3)}, "upper"), ({"keep": torch.ones(3)}, "boolean"),
    ({"keep": torch.ones(4, dtype=torch.bool)}, "broadcast"),
])  # fmt: skip
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        topk(torch.zeros(2, 3), k=2, **arguments)


@pytest.mark.parametrize("fields", [
    {"k": -1}, {"k": 2.0}, {"k": "2"}, {"k": True}, {"ratio": 0}, {"ratio": 1.01}, {"ratio": math.nan},
    {"k": 1, "ratio": 0.5}, {"k": 0, "ratio": 0.5}, {"at_least": 0}, {"k": 4, "at_least": 8}, {"ties": "first"},
])  # fmt: skip
def test_bad_specs_are_refused(fields):
    with pytest.raises(ValidationError):
        TopKSpec.model_validate({"kind": "topk", **fields})


def test_a_bare_spec_wants_a_budget():
    with pytest.raises(ValueError, match="give k, ratio or a budget"):
        TopKSpec().require()
    TopKSpec(k=0).require()
    TopKSpec(ratio=0.5).require()
    TopKSpec.model_validate(parse_yaml("{kind: topk, k: null}")[0]).require()


def test_a_budget_is_k():
    assert TopKSpec.from_budget(8, "cross") == TopKSpec(k=8)
    assert parse_yaml(dump_yaml(TopKSpec(k=8).dump()))[0]["k"] == 8


@pytest.mark.parametrize("length", [200, 256, 257, 700])
@pytest.mark.parametrize("k", [1, 2, 60, 199])
def test_short_and_long_rows_select_alike(length, k):
    """The row length chooses how the k-th score is found."""
    scores = torch.randn(3, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    wanted = torch.zeros(3, length, dtype=torch.bool).scatter(-1, scores.argsort(-1, descending=True)[:, :k], True)
    assert torch.equal(topk(scores, k=k) > 0, wanted)
