"""Rows moved in place stand where a copy would put them, whatever the layout, the type and the number of threads."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.core import native
from attnbench.core import relocate as module
from attnbench.core.relocate import narrowed, relocate


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_a_copy(data):
    rows, heads, keys, width = (data.draw(st.integers(1, most)) for most in (9, 3, 12, 6))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]))
    whole = torch.arange(rows * heads * keys * width).view(rows, heads, keys, width).to(dtype)
    start = data.draw(st.integers(0, keys - 1))
    heads_last = data.draw(st.booleans())
    held = (
        whole.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        if heads_last
        else whole.clone()
    )
    into = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), unique=True)), dtype=torch.int64)
    source = torch.tensor([data.draw(st.integers(0, rows - 1)) for _ in into], dtype=torch.int64)
    relocate([held[:, :, start:]], into, source)
    wanted = whole.clone()
    wanted[into, :, start:] = whole[source, :, start:]
    assert torch.equal(held, wanted)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", [[0, 1, 2], [4, 1, 3], [1, 2, 3], [3, 3, 0], [], [4, 3, 2, 1, 0]])
def test_rows_that_are_kept(rows, compiled):
    """In place, each once though two name it; what shares numbers between rows or requires a gradient is copied."""
    states = torch.randn(5, 2, 3, 4)
    learned = torch.randn(5, 2, 3, 4, requires_grad=True)
    held = [states, states.view(5, 2, 3, 4), torch.randn(1, 2, 3, 4).expand(5, -1, -1, -1), torch.randn(5, 3), learned]
    rows = torch.tensor(rows, dtype=torch.int64)
    wanted = [each[rows].clone() for each in held]
    with nullcontext() if compiled else native.off():
        found = narrowed(held, rows)
    assert all(map(torch.equal, found, wanted))
    assert all(each.untyped_storage().data_ptr() == states.data_ptr() for each in found[:2])
    torch.autograd.grad(found[4].sum(), learned)


def test_two_views_of_the_same_numbers_are_copied():
    states = torch.arange(24.0).view(4, 1, 3, 2)
    held = [states, states[:, :, :2]]
    found = narrowed(held, torch.tensor([1, 2]))
    assert torch.equal(found[0], torch.arange(24.0).view(4, 1, 3, 2)[1:3])
    assert torch.equal(found[1], found[0][:, :, :2])


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_larger_than_the_buffer(threads):
    before = torch.get_num_threads()
    held = torch.randn(40, 3, 300, 64)
    order = torch.randperm(40)
    wanted = held[order].clone()
    try:
        torch.set_num_threads(threads)
        relocate([held], torch.arange(40), order)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(held, wanted)


@pytest.mark.parametrize("compiled", [True, False])
def test_all_of_them_are_moved(compiled):
    held, order = [torch.randn(4, 2, 3, 5), torch.randn(4, 1, 7, 2)], torch.tensor([3, 0, 3, 1])
    wanted = [each[order].clone() for each in held]
    with nullcontext() if compiled else native.off():
        relocate(held, torch.arange(4), order)
    assert all(map(torch.equal, held, wanted))


@pytest.mark.parametrize("row", [4, -1])
def test_rows_that_one_of_them_has_not_are_refused(row):
    """Compiled code would read beyond its end."""
    held = [torch.randn(6, 2, 3, 5), torch.randn(4, 2, 3, 5)]
    for into, source in ((row, 0), (0, row)):
        with pytest.raises(IndexError):
            relocate(held, torch.tensor([into]), torch.tensor([source]))


def test_nothing_to_move():
    relocate([], torch.arange(2), torch.arange(2))
    held = torch.randn(2, 1, 1, 1)
    before = held.clone()
    relocate([held], torch.arange(0), torch.arange(0))
    assert torch.equal(held, before)


def test_without_a_compiler_torch_moves_them():
    held, order = torch.randn(5, 2, 3, 4), torch.tensor([4, 0])
    wanted = held.clone()
    wanted[:2] = held[order]
    with native.off():
        relocate([held], torch.arange(2), order)
    assert torch.equal(held, wanted)


def test_what_does_not_lie_in_positions_is_moved_by_torch():
    held = torch.randn(3, 2, 4, 5).transpose(2, 3)
    assert not module._serves(held)
    wanted = held[[1, 0]].clone()
    relocate([held], torch.arange(2), torch.tensor([1, 0]))
    assert torch.equal(held[:2], wanted)


def test_rows_that_are_not_told_as_asked_are_an_error():
    held = torch.randn(3, 1, 2, 2)
    with pytest.raises(RuntimeError):
        relocate([held], torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="1 rows cannot go to 2"):
        relocate([held], torch.arange(2), torch.arange(1))


@pytest.mark.parametrize(("into", "source"), [([0], [3]), ([3], [0]), ([-1], [0]), ([0], [-1])])
def test_rows_that_are_not_there_are_an_error(into, source):
    with pytest.raises((IndexError, RuntimeError)):
        relocate([torch.zeros(3, 1, 2, 2)], torch.tensor(into), torch.tensor(source))


def test_gradients_go_to_the_rows_that_were_moved():
    first = torch.arange(24.0).view(3, 2, 2, 2).requires_grad_()
    held = first.clone()
    relocate([held], torch.tensor([0]), torch.tensor([2]))
    held.sum().backward()
    assert first.grad is not None
    assert first.grad[:, 0, 0, 0].tolist() == [0, 1, 2]


def test_what_a_backward_pass_still_reads_is_not_changed_in_silence():
    weight, held = torch.ones(3, 2, 2, 2, requires_grad=True), torch.randn(3, 2, 2, 2)
    product = (weight * held).sum()
    relocate([held], torch.tensor([0]), torch.tensor([2]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_inference_tensors():
    with torch.inference_mode():
        held = torch.arange(24.0).view(3, 2, 2, 2)
        relocate([held], torch.tensor([0]), torch.tensor([2]))
        assert torch.equal(held[0], held[2])


def test_rows_that_lie_in_one_place_are_an_error():
    with pytest.raises(RuntimeError, match="single memory location"):
        relocate([torch.zeros(1, 2, 2, 2).expand(3, 2, 2, 2)], torch.tensor([0]), torch.tensor([2]))
