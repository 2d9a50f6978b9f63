from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

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
