"""A step with packed weights is a step of the layers: recurrent ones, and convolutions that move by one position."""

from __future__ import annotations

import pickle

import pytest
import torch
from packing_cases import WAYS, needs_compiler
from torch import Tensor, nn

from attnbench.core import native, packed_steps, products
from attnbench.core import packed as module
from attnbench.core.packed import pack, packed

KINDS = pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])


def layers(kind: type[nn.RNNBase], count: int = 2, **more: object) -> nn.RNNBase:
    torch.manual_seed(0)
    build: object = kind
    return build(12, 20, count, batch_first=True, **more).eval()  # type: ignore[operator] - both take the same


def state(of: nn.RNNBase, rows: int) -> Tensor | tuple[Tensor, Tensor]:
    drawn = torch.randn(2, of.num_layers, rows, of.hidden_size)
    return (drawn[0], drawn[1]) if isinstance(of, nn.LSTM) else drawn[0]


def flat(made: tuple[Tensor, Tensor | tuple[Tensor, ...]]) -> list[Tensor]:
    outputs, after = made
    return [outputs, *((after,) if isinstance(after, Tensor) else after)]


def close(found: object, wanted: object, **near: float) -> None:
    for mine, theirs in zip(flat(found), flat(wanted), strict=True):
        torch.testing.assert_close(mine, theirs, **{"rtol": 1e-5, "atol": 1e-6, **near})


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Layers that were stepped with packed weights."""
    made: list[str] = []
    for name in ("_lstm", "_gru"):
        step = getattr(packed_steps, name)
        monkeypatch.setattr(packed_steps, name, lambda *given, step=step, name=name: made.append(name) or step(*given))
    return made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 5, packed_steps.MOST])
@pytest.mark.parametrize("count", [1, 3])
@KINDS
@torch.no_grad()
def test_one_step_is_that_of_the_layers(kind, count, rows, way, monkeypatch, steps):
    monkeypatch.setattr(module, "_way", lambda dtype: way)
    net, given = layers(kind, count), torch.randn(rows, 1, 12)
    before = state(net, rows)
    wanted = net(given, before)
    with packed(net):
        close(net(given, before), wanted)
    assert len(steps) == count
    close(net(given, before), wanted)
    assert len(steps) == count


@needs_compiler
@KINDS
def test_what_is_no_single_step_without_gradients_goes_through_the_layers(kind, monkeypatch, steps):
    monkeypatch.setattr(module, "_way", lambda dtype: module._Own)
    net = layers(kind, dropout=0.5)
    with packed(net):
        before, given = state(net, 3), torch.randn(3, 1, 12)
        made = flat(net(given, before))
        assert made[0].requires_grad
        with torch.no_grad():
            net(torch.randn(3, 2, 12), before)
            net(given)
            net(given, hx=before)
            net(torch.randn(packed_steps.MOST + 1, 1, 12), state(net, packed_steps.MOST + 1))
            net(nn.utils.rnn.pack_sequence([torch.randn(2, 12), torch.randn(1, 12)]))
            with native.off():
                close(net(given, before), tuple(made[:1]) + ((made[1],) if kind is nn.GRU else (tuple(made[1:]),)))
            net.train()(given, before)
            net.eval()
            with pytest.raises(RuntimeError, match=r"size|Expected"):
                net(torch.randn(3, 1, 11), before)
            with pytest.raises(RuntimeError, match=r"size|Expected"):
                net(given, state(net, 2))
            with pytest.raises((RuntimeError, ValueError)):
                net(given.double(), before)
            assert not steps
            net(given, before)
    assert len(steps) == 2


@needs_compiler
@pytest.mark.parametrize("more", [{"bidirectional": True}, {"bias": False}, {"proj_size": 4}], ids=str)
def test_layers_of_other_kinds_are_left_alone(more):
    net = layers(nn.LSTM, **more)
    with packed(net):
        assert "forward" not in vars(net)


@needs_compiler
def test_layers_that_are_parametrised_or_have_another_forward_are_left_alone():
    net = layers(nn.GRU)
    net.forward = lambda *given: given  # type: ignore[method-assign]
    plain = vars(net)["forward"]
    with packed(net):
        assert vars(net)["forward"] is plain

    class Other(nn.LSTM):
        pass

    other = Other(12, 20, batch_first=True)
    with packed(other):
        assert "forward" not in vars(other)
    normed = nn.utils.parametrizations.weight_norm(layers(nn.LSTM), "weight_hh_l0")
    with packed(normed):
        assert "forward" not in vars(normed)
    wide = layers(nn.LSTM).double()
    with packed(wide):
        assert "forward" not in vars(wide)


@needs_compiler
@torch.no_grad()
def test_layers_that_never_step_are_not_copied(monkeypatch):
    monkeypatch.setattr(module, "_way", lambda dtype: module._Own)
    net = layers(nn.LSTM)
    monkeypatch.setattr(products, "pack", lambda *given: pytest.fail("packed"))
    with packed(net):
        net(torch.randn(3, 4, 12))


@needs_compiler
@KINDS
@torch.no_grad()
def test_beside_linear_layers_of_8_bits_they_stay_in_float32(kind, steps):
    net = nn.ModuleList([layers(kind), nn.Linear(20, 6)])
    given, before = torch.randn(3, 1, 12), state(net[0], 3)
    wanted = net[0](given, before)
    with packed(net, "int8"), packed(net, "int8"):
        close(net[0](given, before), wanted)
    assert len(steps) == 2
    assert "forward" not in vars(net[0])


@pytest.mark.skipif(not module._own_packs(torch.bfloat16), reason="this processor does not multiply bfloat16")
@KINDS
@torch.no_grad()
def test_under_autocast_operands_are_rounded_and_states_are_not(kind, monkeypatch, steps):
    monkeypatch.setattr(module, "_way", lambda dtype: module._Own)
    net, given = layers(kind), torch.randn(3, 1, 12)
    before = state(net, 3)
    wanted = net(given, before)
    with torch.autocast("cpu", torch.bfloat16), packed(net):
        found = net(given, before)
        with torch.autocast("cpu", enabled=False):
            close(net(given, before), wanted)
        assert len(steps) == 2
    assert found[0].dtype == torch.float32
    close(found, wanted, rtol=2e-2, atol=2e-2)


class Convolution(packed_steps.Window):
    """Of three positions of 5 numbers; what it makes is doubled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.span = 3, 5
        self.weight, self.bias = nn.Parameter(torch.randn(7, 5, 3)), nn.Parameter(torch.randn(7))

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * nn.functional.conv1d(inputs.transpose(1, 2), self.weight, self.bias).transpose(1, 2)

    def flat(self) -> tuple[Tensor, Tensor]:
        return self.weight.transpose(1, 2).flatten(1), self.bias

    def finish(self, product: Tensor) -> Tensor:
        finished.append(len(product))
        return 2 * product


finished: list[int] = []
"""Rows of steps that were made of packed weights."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 4, 300])
@torch.no_grad()
def test_one_place_of_a_convolution_is_one_product(rows, way, monkeypatch):
    monkeypatch.setattr(module, "_way", lambda dtype: way)
    net, given = Convolution().eval(), torch.randn(rows, 3, 5)
    wanted = net(given)
    finished.clear()
    with packed(net):
        torch.testing.assert_close(net(given), wanted, rtol=1e-5, atol=1e-5)
    assert finished == [rows]


@needs_compiler
@torch.no_grad()
def test_a_convolution_that_makes_something_else_of_it_is_left_alone():
    class Colder(Convolution):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) / 2

    net, given = Colder().eval(), torch.randn(2, 3, 5)
    wanted = net(given)
    with packed(net):
        torch.testing.assert_close(net(given), wanted)
        assert "forward" not in vars(net)


@needs_compiler
def test_other_calls_go_through_the_convolution_itself(monkeypatch):
    monkeypatch.setattr(module, "_way", lambda dtype: module._Own)
    net, given = Convolution().eval(), torch.randn(2, 3, 5)
    finished.clear()
    with packed(net):
        assert net(given).requires_grad
        with torch.no_grad():
            assert net(torch.randn(2, 4, 5)).shape == (2, 2, 7)
            net.train()(given)
            net.eval().add_module("dropout", nn.Dropout())
            net(given)
            net.eval()
            assert net(given[:0]).shape == (0, 1, 7)
            with native.off():
                net(given)
            with torch.autocast("cpu", torch.bfloat16):
                net(given)
            with pytest.raises(RuntimeError, match=r"channels|size"):
                net(torch.randn(2, 3, 4))
            with pytest.raises(RuntimeError):
                net(torch.randn(2, 2, 5))
            assert not finished
            net(given)
    assert finished == [2]


@needs_compiler
@KINDS
@torch.no_grad()
def test_weights_that_stand_there_for_a_call_are_not_those_that_are_packed(kind, steps):
    net, given = layers(kind), torch.randn(3, 1, 12)
    before = state(net, 3)
    wanted = net(given, before)
    none = {name: torch.zeros_like(each) for name, each in net.named_parameters()}
    with packed(net):
        kept = net._parameters.pop("bias_hh_l1")
        close(net(given, before), wanted)  # torch has a list of its own
        assert not steps
        net._parameters["bias_hh_l1"] = kept
        for _ in range(2):
            found = torch.func.functional_call(net, none, (given, before))
            assert not steps
            assert not torch.allclose(found[0], wanted[0])
        close(net(given, before), wanted)
    assert len(steps) == 2


@needs_compiler
@torch.no_grad()
def test_a_state_of_another_form_is_left_to_the_layers():
    net, given = layers(nn.GRU), torch.randn(3, 1, 12)
    with packed(net), pytest.raises(AttributeError, match="dim"):
        net(given, (state(net, 3),))
    pair = layers(nn.LSTM)
    with packed(pair), pytest.raises((AttributeError, RuntimeError, ValueError, TypeError)):
        pair(given, state(pair, 3)[0])


@pytest.mark.parametrize("way", WAYS)
@KINDS
@torch.no_grad()
def test_a_model_that_stays_packed_is_pickled(kind, way, monkeypatch):
    monkeypatch.setattr(module, "_way", lambda dtype: way)
    net, given = layers(kind), torch.randn(3, 1, 12)
    pack(net)
    before = state(net, 3)
    for _ in range(2):  # before its first step, and after it
        close(pickle.loads(pickle.dumps(net))(given, before), net(given, before))
