from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from attnbench.core import native
from attnbench.tasks import loss as module
from attnbench.tasks.loss import smoothed_cross_entropy


def case(rows: int = 7, vocab: int = 11, scale: float = 3.0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(rows * 100 + vocab)
    logits = (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)
    return logits.requires_grad_(), torch.randint(vocab, (rows,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("block", [1, 25, 1 << 19])
@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
def test_values_and_gradients_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, smoothing: float, block: int, scale: float
):
    monkeypatch.setattr(module, "BLOCK", block)
    logits, target = case(scale=scale)
    loss, nll = smoothed_cross_entropy(logits, target, smoothing)
    (3 * loss).backward()
    mine, logits.grad = logits.grad, None
    expected = cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
    (3 * expected).backward()
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert torch.allclose(nll, cross_entropy(logits, target, reduction="sum"), rtol=1e-12)
    assert mine is not None
    assert logits.grad is not None
    assert torch.allclose(mine, logits.grad, rtol=1e-9, atol=1e-12)


def test_gradients_by_finite_differences():
    logits, target = case(3, 5, 1.0)
    assert torch.autograd.gradcheck(lambda x: smoothed_cross_entropy(x, target, 0.2)[0], (logits,))


def test_the_unsmoothed_part_carries_no_gradient():
    logits, target = case()
    _, nll = smoothed_cross_entropy(logits, target, 0.1)
    assert not nll.requires_grad


def test_half_precision_is_summed_in_float32():
    logits, target = case(300, 50, dtype=torch.bfloat16)
    loss, nll = smoothed_cross_entropy(logits, target, 0.1)
    assert loss.dtype is nll.dtype is torch.float32
    wide = cross_entropy(logits.detach().double(), target, reduction="sum", label_smoothing=0.1)
    assert torch.allclose(loss.detach().double(), wide, rtol=1e-5)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.dtype is torch.bfloat16


def test_without_gradients_and_without_rows():
    logits, target = case()
    with torch.no_grad():
        alone = smoothed_cross_entropy(logits, target, 0.1)
    assert torch.equal(alone[0], smoothed_cross_entropy(logits, target, 0.1)[0])
    empty, none = logits[:0], target[:0]
    loss, nll = smoothed_cross_entropy(empty, none, 0.1)
    loss.backward()
    assert loss.item() == nll.item() == 0.0


@pytest.mark.skipif(native.load(module._SOURCE) is None, reason="no C++ compiler: torch operations serve")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (5, 3), (70, 1003)])
@pytest.mark.parametrize("scale", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_compiled_path_gives_the_same(dtype, rows, vocab, scale, smoothing):
    logits, target = case(rows, vocab, scale)
    given = logits.detach().to(dtype).requires_grad_()
    loss, nll = smoothed_cross_entropy(given, target, smoothing)
    (2 * loss).backward()
    with native.off():
        exact = given.detach().double().requires_grad_()
        wanted, wanted_nll = smoothed_cross_entropy(exact, target, smoothing)
        (2 * wanted).backward()
    assert torch.allclose(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.allclose(nll.double(), wanted_nll, rtol=1e-5, atol=1e-5)
    assert given.grad is not None
    assert exact.grad is not None
    tolerance = 1e-6 if dtype == torch.float32 else 0.01
    assert torch.allclose(given.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("content", [math.nan, math.inf])
def test_what_is_not_a_number_is_seen(content):
    logits, target = case(4, 40, dtype=torch.float32)
    with torch.no_grad():
        logits[2, 7] = content
    loss, nll = smoothed_cross_entropy(logits, target, 0.1)
    loss.backward()
    assert not math.isfinite(loss.item())
    assert not math.isfinite(nll.item())
    assert logits.grad is not None
    assert bool(logits.grad[2].isnan().any())
    assert bool(logits.grad[[0, 1, 3]].isfinite().all())


def test_a_word_that_cannot_be_costs_nothing_without_smoothing():
    logits, target = case(3, 30, dtype=torch.float32)
    with torch.no_grad():
        logits[:, (int(target[0]) + 1) % 30] = -math.inf
    safe = target.clone().fill_(int(target[0]))
    loss, _ = smoothed_cross_entropy(logits, safe, 0.0)
    assert torch.allclose(loss, cross_entropy(logits, safe, reduction="sum"), rtol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 30])
def test_a_target_that_is_no_word_is_an_error(wrong):
    logits, target = case(3, 30, dtype=torch.float32)
    target[1] = wrong
    with pytest.raises((IndexError, RuntimeError)):
        smoothed_cross_entropy(logits, target, 0.1)


def test_targets_of_another_type_are_read_as_what_they_are():
    logits, target = case(3, 30, dtype=torch.float32)
    loss, _ = smoothed_cross_entropy(logits, target.int(), 0.1)
    assert torch.allclose(loss, smoothed_cross_entropy(logits, target, 0.1)[0], rtol=1e-5)
