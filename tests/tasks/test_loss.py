from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from attnbench.core import native
from attnbench.tasks import loss as module
from attnbench.tasks.loss import output_loss, smoothed_cross_entropy


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


@pytest.mark.parametrize("compiled", [True, False])
def test_a_word_that_cannot_be_costs_nothing_without_smoothing(compiled):
    logits, target = case(3, 30, dtype=torch.float32)
    with torch.no_grad():
        logits[:, (int(target[0]) + 1) % 30] = -math.inf
    safe = target.clone().fill_(int(target[0]))
    with contextlib.nullcontext() if compiled else native.off():
        loss, _ = smoothed_cross_entropy(logits, safe, 0.0)
    assert torch.allclose(loss, cross_entropy(logits, safe, reduction="sum"), rtol=1e-5)


@pytest.mark.parametrize(("level", "smoothing"), [(0.0, 0.1), (1e4, 0.1), (1e30, 0.0)])
@pytest.mark.parametrize("compiled", [True, False])
def test_where_logits_lie_does_not_matter(level, smoothing, compiled):
    """Equal ones, whose loss is that of the uniform distribution."""
    logits, target = torch.full((3, 32), level), torch.tensor([0, 7, 31])
    with contextlib.nullcontext() if compiled else native.off():
        found = smoothed_cross_entropy(logits, target, smoothing)
    for value in found:
        assert value.item() == pytest.approx(3 * math.log(32), rel=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_logits_that_lie_far_from_0_are_compared_with_one_another(compiled):
    generator = torch.Generator().manual_seed(0)
    logits = 1e4 + torch.randn(20, 10_001, generator=generator)
    target = torch.randint(10_001, (20,), generator=generator)
    with contextlib.nullcontext() if compiled else native.off():
        loss, _ = smoothed_cross_entropy(logits, target, 0.9)
    expected = cross_entropy(logits.double(), target, reduction="sum", label_smoothing=0.9)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


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


class Output(torch.nn.Module):
    """A parameter that logits depend on through another one, one that is frozen, and one that is not asked."""

    def __init__(self, width: int = 6, vocab: int = 11) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.target_vocab = vocab
        self.inner, self.outer = torch.nn.Linear(width, width), torch.nn.Linear(width, vocab)
        self.outer.bias.requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.zeros(2))
        self.seen: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(hidden))
        return self.outer(torch.tanh(self.inner(hidden)))


def both(model: Output, hidden: torch.Tensor, target: torch.Tensor, limit: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LOGITS", limit)
    model.zero_grad()
    model.seen.clear()
    given = hidden.detach().requires_grad_()
    loss, nll = output_loss(model, given, target, 0.1)
    (0.5 * loss).backward()
    assert not nll.requires_grad
    return loss.detach(), nll, given.grad, [each.grad for each in model.parameters()], list(model.seen)


@pytest.mark.parametrize(("limit", "seen"), [(77, [7]), (76, [6, 1]), (33, [3, 3, 1]), (1, [1] * 7)])
def test_a_part_of_the_logits_at_a_time_gives_the_same(monkeypatch, limit, seen):
    model, hidden, target = Output(), torch.randn(7, 6), torch.arange(7)
    *wanted, _ = both(model, hidden, target, 1 << 20, monkeypatch)
    *found, parts = both(model, hidden, target, limit, monkeypatch)
    assert parts == seen
    torch.testing.assert_close(found[:3], wanted[:3], rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(found[3], wanted[3], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_that_share_a_gradient(monkeypatch):
    class Sum(Output):
        def logits(self, hidden):
            return hidden @ (self.one + self.other).T

        def __init__(self):
            super().__init__()
            self.one, self.other = (torch.nn.Parameter(torch.randn(11, 6)) for _ in range(2))

    model, hidden, target = Sum(), torch.randn(7, 6), torch.arange(7)
    *wanted, _ = both(model, hidden, target, 1 << 20, monkeypatch)
    *found, _ = both(model, hidden, target, 33, monkeypatch)
    for mine, theirs in zip(found[3], wanted[3], strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_no_gradient_where_none_is_asked_for(monkeypatch):
    monkeypatch.setattr(module, "LOGITS", 33)
    model, hidden, target = Output(), torch.randn(7, 6), torch.arange(7)
    with torch.no_grad():
        loss, nll = output_loss(model, hidden, target, 0.1)
    wanted = smoothed_cross_entropy(model.logits(hidden), target, 0.1)
    torch.testing.assert_close((loss, nll), tuple(each.detach() for each in wanted))
    assert model.seen[:3] == [3, 3, 1]


def test_hidden_states_that_want_no_gradient(monkeypatch):
    monkeypatch.setattr(module, "LOGITS", 33)
    model, hidden, target = Output(), torch.randn(7, 6), torch.arange(7)
    output_loss(model, hidden, target, 0.1)[0].backward()
    found = model.inner.weight.grad.clone()
    model.zero_grad()
    smoothed_cross_entropy(model.logits(hidden), target, 0.1)[0].backward()
    torch.testing.assert_close(found, model.inner.weight.grad, rtol=1e-5, atol=1e-6)


def test_bfloat16_products_keep_float32_gradients(monkeypatch):
    model, hidden, target = Output(), torch.randn(7, 6), torch.arange(7)
    with torch.autocast("cpu", torch.bfloat16):
        *wanted, _ = both(model, hidden, target, 1 << 20, monkeypatch)
        *found, _ = both(model, hidden, target, 33, monkeypatch)
    torch.testing.assert_close(found[:3], wanted[:3], rtol=2e-2, atol=2e-2)
    for mine, theirs in zip(found[3], wanted[3], strict=True):
        assert mine is None or mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_other_defaults_of_torch_change_nothing(default):
    logits, target = case(dtype=torch.float32)
    wanted = smoothed_cross_entropy(logits, target, 0.1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):
            found = smoothed_cross_entropy(logits, target, 0.1)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, wanted)


def test_a_second_derivative_is_refused():
    logits, target = case()
    loss, _ = smoothed_cross_entropy(logits, target, 0.1)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_ignored_count_nothing_and_move_nothing(compiled, dtype):
    logits, target = case(40, 30, dtype=dtype)
    ignored = torch.arange(40) % 3 == 0
    with torch.no_grad():
        logits[0] = math.nan
    given = target.masked_fill(ignored, module.IGNORED)
    with contextlib.nullcontext() if compiled else native.off():
        loss, nll = smoothed_cross_entropy(logits, given, 0.1)
        loss.backward()
    found, logits.grad = logits.grad, None
    wanted = smoothed_cross_entropy(logits[~ignored], target[~ignored], 0.1)
    wanted[0].backward()
    assert torch.allclose(loss, wanted[0], rtol=1e-5)
    assert torch.allclose(nll, wanted[1], rtol=1e-5)
    assert found is not None
    assert logits.grad is not None
    assert torch.allclose(found[~ignored], logits.grad[~ignored], rtol=1e-2, atol=1e-6)
    assert not found[ignored].any()
