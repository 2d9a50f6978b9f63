"""Recurrent layers made for training on a processor are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from attnbench.core import native
from attnbench.models import _cells

LENGTHS = torch.tensor([5, 1, 7, 3, 3])
KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


def keep(x: Tensor) -> Tensor:
    return x


def layers(kind: Any, count: int = 2, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    torch.manual_seed(0)
    return kind(4, 6, count, batch_first=True, dtype=dtype, **more)


def packed(inputs: Tensor) -> PackedSequence:
    return pack_padded_sequence(inputs, LENGTHS[: len(inputs)], batch_first=True, enforce_sorted=False)


def parts(made: Any) -> list[Tensor]:
    states, last = made
    return [states.data, *(last if isinstance(last, tuple) else (last,))]


def alike(found: list[Tensor], wanted: list[Tensor], of: list[Tensor], near: float = 1e-12) -> None:
    """Values, and gradients of all of them together."""
    torch.manual_seed(1)
    upstream = [torch.randn_like(each) for each in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)
    slopes = (torch.autograd.grad(each, of, upstream, allow_unused=True) for each in (found, wanted))
    for mine, theirs in zip(*slopes, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=10 * near, atol=10 * near)


@KINDS
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_rows_are_read_as_torch_reads_them(kind: Any, count: int, bidirectional: bool):
    module = layers(kind, count, bidirectional=bidirectional)
    inputs = torch.randn(5, 7, 4, dtype=torch.float64, requires_grad=True)
    found, wanted = _cells.read(module, packed(inputs), keep), module(packed(inputs))
    assert found[0].batch_sizes.equal(wanted[0].batch_sizes)
    alike(parts(found), parts(wanted), [inputs, *module.parameters()])


@KINDS
def test_in_float32_with_compiled_gates_they_are_close(kind: Any):
    module = layers(kind, 2, torch.float32, bidirectional=True)
    inputs = torch.randn(5, 7, 4, requires_grad=True)
    found, wanted = _cells.read(module, packed(inputs), keep), module(packed(inputs))
    alike(parts(found), parts(wanted), [inputs, *module.parameters()], near=1e-6)


@KINDS
@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_steps_are_those_of_torch_with_what_joins_their_inputs(kind: Any, late: int, count: int):
    module, states = layers(kind, count), 2 if kind is nn.LSTM else 1
    inputs = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    drawn = [torch.randn(count, 3, 6, dtype=torch.float64, requires_grad=True) for _ in range(states)]
    cells, found = tuple(zip(*drawn, strict=True)), []
    early, rest = inputs.split([4 - late, late], 2)
    steps = _cells.Steps(module, early, keep)
    for step in rest.unbind(1):
        cells = steps(step if late else None, cells)
        found.append(cells[-1][0])
    ends = [torch.stack(each) for each in zip(*cells, strict=True)]
    wanted, last = module(inputs, tuple(drawn) if states > 1 else drawn[0])
    alike(
        [torch.stack(found, 1), *ends],
        [wanted, *(last if states > 1 else (last,))],
        [inputs, *drawn, *module.parameters()],
    )


@KINDS
def test_what_goes_from_layer_to_layer_is_dropped_out(kind: Any):
    module, calls = layers(kind, 3), []

    def drop(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return torch.zeros_like(x)

    inputs = torch.randn(5, 7, 4, dtype=torch.float64)
    _, last = _cells.read(module, packed(inputs), drop)
    assert calls == [(int(LENGTHS.sum()), 6)] * 2
    _, other = _cells.read(module, packed(2 * inputs), drop)
    assert not torch.equal(last[0][0], other[0][0])
    assert torch.equal(last[0][1:], other[0][1:])
    calls.clear()
    start = ((torch.zeros(5, 6, dtype=torch.float64),) * len(last),) * 3
    after = _cells.Steps(module, inputs, drop)(None, start)
    assert calls == [(5, 6)] * 2
    assert torch.equal(after[-1][0], _cells.Steps(module, 2 * inputs, drop)(None, start)[-1][0])


@KINDS
def test_states_stay_in_float32_where_products_are_in_bfloat16(kind: Any):
    module, inputs = layers(kind, 2, torch.float32), torch.randn(5, 7, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, last = _cells.read(module, packed(inputs), keep)
        start = tuple(tuple(each.bfloat16() for each in state) for state in zip(*last, strict=True))
        after = _cells.Steps(module, inputs, keep)(None, start)
    assert {each.dtype for each in (states.data, *last, *sum(after, ()))} == {torch.float32}
    alike_to = parts(module(packed(inputs)))
    for mine, theirs in zip([states.data, *last], alike_to, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02)
    states.data.sum().backward()
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in module.parameters())


@KINDS
def test_it_serves_what_is_trained_on_a_processor(kind: Any, monkeypatch):
    module, inputs = layers(kind), torch.randn(2, 3, 4, dtype=torch.float64)
    assert _cells.serves(module, inputs)
    with native.off():  # torch's layers define it
        assert not _cells.serves(module, inputs)
    monkeypatch.setenv(native.SWITCH, "0")  # without a compiler, too
    assert _cells.serves(module, inputs)
    with torch.no_grad():
        assert not _cells.serves(module, inputs)
    assert not _cells.serves(module, inputs.to("meta"))
    assert not _cells.serves(layers(kind, bias=False), inputs)
    special = type("Special", (kind,), {})
    assert not _cells.serves(layers(special), inputs)


@KINDS
@pytest.mark.parametrize("where", ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"])
def test_who_looks_at_the_layers_sees_them(kind: Any, where: str):
    module, inputs = layers(kind), torch.randn(2, 3, 4, dtype=torch.float64)
    held = getattr(module, where)(lambda *_: None)
    assert not _cells.serves(module, inputs)
    held.remove()
    assert _cells.serves(module, inputs)
    of_all = getattr(nn.modules.module, where.replace("register_", "register_module_"))(lambda *_: None)
    assert not _cells.serves(module, inputs)
    of_all.remove()
    module.forward = module.forward
    assert not _cells.serves(module, inputs)


@KINDS
def test_a_target_has_as_many_steps_as_tokens(kind: Any):
    module = layers(kind, 1)
    start = ((torch.zeros(2, 6, dtype=torch.float64),) * (2 if kind is nn.LSTM else 1),)
    steps = _cells.Steps(module, torch.randn(2, 1, 4, dtype=torch.float64), keep)
    steps(None, start)
    with pytest.raises(ValueError, match="no more tokens"):
        steps(None, start)


@KINDS
def test_it_leaves_what_is_mapped_over_to_torch(kind: Any):
    module, served = layers(kind), []

    def look(each: Tensor) -> Tensor:
        served.append(_cells.serves(module, each))
        return each

    torch.func.vmap(look)(torch.randn(2, 3, 4, dtype=torch.float64))
    assert served == [False]
