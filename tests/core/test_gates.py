"""Gates in one compiled pass are those of torch's cells, and so are their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from packing_cases import needs_compiler
from torch import Tensor

from attnbench.core import gates, native

KINDS = pytest.mark.parametrize("kind", ["lstm", "gru"])


def given(kind: str, rows: int, width: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(rows + width)
    shapes = [(rows, 4 * width), (rows, width)] if kind == "lstm" else [(rows, 3 * width)] * 2 + [(rows, width)]
    return [(scale * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


def made(kind: str, of: list[Tensor]) -> list[Tensor]:
    found = getattr(gates, kind)(*of)
    return list(found) if isinstance(found, tuple) else [found]


def slopes(found: list[Tensor], of: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(found, of, [torch.randn(each.shape).to(each.dtype) for each in found]))


def by_torch(kind: str, of: list[Tensor]) -> list[Tensor]:
    """Of cells whose weights pass products on as they are."""
    width = of[-1].shape[1]
    if kind == "lstm":
        products, cell = of
        zeros = products.new_zeros(4 * width, width), products.new_zeros(4 * width)
        eye = torch.eye(4 * width, dtype=products.dtype)
        return list(torch.lstm_cell(products, (torch.zeros_like(cell), cell), eye, zeros[0], zeros[1], zeros[1]))
    ours, theirs, hidden = of
    reset, keep, new = ours.chunk(3, 1)
    ur, uz, un = theirs.chunk(3, 1)
    keep = torch.sigmoid(keep + uz)
    return [(1 - keep) * torch.tanh(new + torch.sigmoid(reset + ur) * un) + keep * hidden]


@KINDS
def test_the_definition_is_that_of_the_cells_of_torch(kind: str):
    of = given(kind, 3, 5, torch.float64)
    for mine, theirs in zip(made(kind, of), by_torch(kind, of), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


@needs_compiler
@KINDS
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 5), (2, 64), (161, 77)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_compiled_gates_and_their_gradients_are_those_of_torch(kind: str, rows: int, width: int, scale: float):
    of = given(kind, rows, width, scale=scale)
    exact = [each.detach().double().requires_grad_() for each in of]
    found, wanted = made(kind, of), by_torch(kind, exact)
    digit = torch.finfo(torch.float32).eps
    for mine, theirs in zip(found, wanted, strict=True):  # of numbers up to some 4 times the scale, each rounded
        torch.testing.assert_close(mine.double(), theirs, rtol=8 * digit, atol=4 * digit * scale)
    for mine, theirs in zip(slopes(found, of), slopes(wanted, exact), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=32 * digit, atol=8 * digit * max(1.0, scale))


@needs_compiler
@KINDS
def test_what_lies_apart_is_read_as_it_is(kind: str):
    of = given(kind, 6, 8)
    apart = [each.detach().t().contiguous().t().requires_grad_() for each in of]
    wanted, found = made(kind, of), made(kind, apart)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    assert all(torch.equal(*each) for each in zip(slopes(found, apart), slopes(wanted, of), strict=True))


@needs_compiler
@pytest.mark.parametrize("which", [0, 1])
def test_one_of_the_two_states_may_be_all_that_is_used(which: int):
    of = given("lstm", 3, 5)
    found = slopes([made("lstm", of)[which]], of)
    with native.off():
        wanted = slopes([made("lstm", of)[which]], of)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@needs_compiler
@KINDS
def test_nan_stays_in_its_unit_and_infinities_saturate(kind: str):
    of = given(kind, 2, 5)
    with torch.no_grad():
        of[0][0, 1] = math.nan
        of[0][1, 2], of[0][1, 5 + 3] = math.inf, -math.inf
    found = made(kind, of)
    with native.off():
        wanted = made(kind, of)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7, equal_nan=True)
    assert found[0].isnan().sum() == 1


@needs_compiler
@KINDS
def test_there_may_be_no_rows_and_there_is_no_second_derivative(kind: str):
    empty = [each[:0] for each in given(kind, 2, 4)]
    assert made(kind, empty)[0].shape == (0, 4)
    of = given(kind, 2, 4)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(made(kind, of)[0].sum(), of[0], create_graph=True)


@needs_compiler
@KINDS
def test_other_types_and_transforms_are_left_to_torch(kind: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    call: Callable[..., None] = gates._call
    monkeypatch.setattr(gates, "_call", lambda name, *rest: (calls.append(name), call(name, *rest))[1])
    made(kind, given(kind, 2, 4, torch.float64))
    made(kind, given(kind, 2, 4, torch.bfloat16))
    torch.func.vmap(lambda *each: getattr(gates, kind)(*each), in_dims=0)(*(each[None] for each in given(kind, 2, 4)))
    assert not calls
    made(kind, given(kind, 2, 4))
    assert calls == [f"attnbench_{kind}"]
