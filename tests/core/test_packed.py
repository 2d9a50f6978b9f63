"""Packed layers compute what the layers compute, in the block alone, and only what they may."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from packing_cases import WAYS, needs_compiler
from torch import nn

from attnbench.core import measured, native
from attnbench.core import packed as module
from attnbench.core.files import cache_root
from attnbench.core.packed import pack, packed
from attnbench.core.quantization import multiply, quantize

needs_packing = pytest.mark.skipif(
    not (module._own_packs(torch.float32) or module._library_packs(torch.float32)), reason="nothing packs weights here"
)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 7, bias=False))


def is_packed(net: nn.Module) -> bool:
    return any("forward" in vars(each) for each in net.modules())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(1, 24), (64, 24), (321, 24), (3, 5, 24), (24,)])
def test_the_same_products_whatever_the_rows(shape, way, monkeypatch):
    monkeypatch.setattr(module, "_way", lambda dtype: way)
    net, states = model(), torch.randn(*shape)
    with torch.no_grad():
        wanted = net(states)
        with packed(net):
            assert is_packed(net)
            found = net(states)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert not is_packed(net)


def test_nothing_stays_after_an_error():
    net = model()
    with pytest.raises(ZeroDivisionError), packed(net):
        raise ZeroDivisionError
    assert not is_packed(net)


def test_weights_that_changed_are_taken_up_by_the_next_block():
    net, states = model(), torch.randn(5, 24)
    with torch.no_grad():
        with packed(net):
            before = net(states)
        net[2].weight.mul_(2)
        with packed(net):
            torch.testing.assert_close(net(states), 2 * before)


def test_what_is_drawn_afterwards_is_what_it_would_have_been():
    torch.manual_seed(0)
    wanted = torch.randn(3)
    torch.manual_seed(0)
    for each in (module._library_packs, module._own_is_exact, module._own_gain):
        each.cache_clear()
    module._way(torch.float32)
    assert torch.equal(torch.randn(3), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_the_layers_refuse_stays_refused(dtype):
    net = model()
    with torch.no_grad(), packed(net), pytest.raises(RuntimeError):
        net(torch.randn(3, 24, dtype=dtype))


@needs_packing
def test_blocks_within_blocks_end_with_the_outer_one():
    net = model()
    with packed(net):
        with packed(net):
            pass
        assert is_packed(net)
    assert not is_packed(net)
    assert len(pack(net)) == 2
    with packed(net):
        pass
    assert is_packed(net)


@needs_packing
@pytest.mark.skipif(module._way(torch.bfloat16) is None, reason="this processor packs no bfloat16 weights")
def test_autocast_decides_the_type():
    net, states = model(), torch.randn(9, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = net(states)
        with packed(net):
            found = net(states)
            with torch.autocast("cpu", enabled=False):
                wide = net(states)  # not in the type that was packed: the layer itself
    assert wanted.dtype is torch.bfloat16
    assert found.dtype is (torch.float32 if module._way(torch.bfloat16) is module._Own else torch.bfloat16)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2, check_dtype=False)
    torch.testing.assert_close(wide, net(states).detach(), rtol=1e-5, atol=1e-6)


def test_gradients_go_through_the_layers_themselves():
    net, states = model(), torch.randn(5, 24)
    with packed(net):
        net(states).sum().backward()
    assert net[0].weight.grad is not None


def test_states_without_rows():
    net = model()
    with torch.no_grad(), packed(net):
        assert net(torch.randn(0, 24)).shape == (0, 7)


@needs_packing
def test_layers_of_other_kinds_are_left_alone():
    double, parametrised = nn.Linear(4, 4, dtype=torch.float64), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    net = nn.ModuleList([double, parametrised, nn.Linear(4, 4)])
    with packed(net):
        assert [is_packed(each) for each in net] == [False, False, True]


@pytest.fixture
def nothing_known():
    """What was found out of the ways of packing is forgotten, before and after."""
    known = (module._library_packs, module._own_is_exact, module._own_gain)
    for each in known:
        each.cache_clear()
    yield
    for each in known:
        each.cache_clear()


def inexact(way):
    return type("Inexact", (way,), {"__call__": lambda self, states: 1.01 * way.__call__(self, states)})


@needs_packing
def test_what_is_not_exact_packs_nothing(nothing_known, monkeypatch):
    monkeypatch.setattr(module, "_Library", inexact(module._Library))
    monkeypatch.setattr(module, "_Own", inexact(module._Own))
    net = model()
    with packed(net):
        assert not is_packed(net)


def test_a_torch_and_a_machine_that_pack_nothing_leave_the_layers_as_they_are(nothing_known, monkeypatch):
    def refuse(self, weight, bias, dtype):
        raise AttributeError("no such operation")

    monkeypatch.setattr(module._Library, "__init__", refuse)
    net, states = model(), torch.randn(5, 24)
    with native.off(), packed(net):
        assert not is_packed(net)
    torch.testing.assert_close(copy.deepcopy(net)(states), net(states))


@pytest.mark.skipif(
    not (module._own_packs(torch.float32) and module._library_packs(torch.float32)), reason="one way alone is here"
)
@pytest.mark.parametrize(("gain", "way"), [(1.2, "_Own"), (0.8, "_Library")])
def test_the_faster_way_is_taken_as_it_was_measured_once(gain, way, nothing_known, monkeypatch, tmp_path):
    compiled = cache_root() / "native"
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path))
    (tmp_path / "native").symlink_to(compiled)
    monkeypatch.setattr(measured, "gain", lambda ways, rounds, enough: gain)
    assert module._way(torch.float32) is getattr(module, way)
    module._own_gain.cache_clear()
    monkeypatch.setattr(measured, "gain", lambda ways, rounds, enough: 1 / gain)
    assert module._way(torch.float32) is getattr(module, way)


def test_a_layer_refuses_states_of_another_width():
    net = model()
    with torch.no_grad(), packed(net):
        with pytest.raises(RuntimeError, match="shapes"):
            net(torch.randn(3, 12))
        with pytest.raises(RuntimeError, match="1D"):
            net(torch.tensor(1.0))


@pytest.mark.parametrize("way", WAYS)
def test_what_compiled_code_cannot_read_goes_through_the_layers(way, monkeypatch):
    monkeypatch.setattr(module, "_way", lambda dtype: way)
    net, states = model(), torch.randn(5, 24)
    with torch.no_grad():
        wanted = net(states)
        with packed(net):
            negated = torch._neg_view(-states)
            assert negated.is_neg()
            torch.testing.assert_close(net(negated), wanted)
            torch.testing.assert_close(torch.func.vmap(net)(states), wanted)
            with pytest.raises(RuntimeError, match="meta"):
                net(states.to("meta"))


@needs_compiler
def test_where_compiled_code_is_off_layers_packed_before_are_as_they_were(monkeypatch):
    monkeypatch.setattr(module, "_way", lambda dtype: module._Own)
    monkeypatch.setattr(module.products, "multiply", lambda *given: pytest.fail("compiled code ran"))
    net = model()
    with torch.no_grad(), packed(net), native.off():
        assert net(torch.randn(5, 24)).shape == (5, 7)


ROUNDING = [
    pytest.param(
        module._Own, marks=pytest.mark.skipif(not module._own_packs(torch.int8), reason="nothing multiplies 8 bits")
    ),
    module._Defined,
]


def as_defined(net: nn.Sequential, states: torch.Tensor) -> torch.Tensor:
    hidden = net[1](multiply(states, quantize(net[0].weight), net[0].bias))
    return multiply(hidden, quantize(net[2].weight))


@pytest.mark.parametrize("way", ROUNDING)
@pytest.mark.parametrize("shape", [(1, 24), (64, 24), (3, 5, 24), (24,), (0, 24)])
@torch.no_grad()
def test_8_bits_are_multiplied_as_they_are_defined(shape, way, monkeypatch):
    monkeypatch.setattr(module, "_way", lambda dtype: {torch.int8: way}[dtype])
    net, states = model(), torch.randn(*shape)
    wanted = as_defined(net, states) if states.numel() else net(states)
    with packed(net, "int8"):
        found = net(states)
        with torch.autocast("cpu", torch.bfloat16):
            half = net(states)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    if states.numel():
        assert not torch.equal(found, net(states))
        assert torch.equal(half, found)
    assert not is_packed(net)


@torch.no_grad()
def test_8_bits_without_compiled_code():
    net, states = model(), torch.randn(5, 24)
    with native.off(), packed(net, "int8"):
        assert module.chosen(torch.int8) == ("torch operations", None)
        assert torch.equal(net(states), as_defined(net, states))


@pytest.mark.skipif(not module._own_packs(torch.int8), reason="nothing multiplies 8 bits")
@torch.no_grad()
def test_8_bits_in_compiled_code():
    assert module.chosen(torch.int8) == ("code compiled here", None)
    net = model()
    with packed(net, "int8"):
        assert [type(each.forward.product) for each in (net[0], net[2])] == 2 * [module._Own]
        with native.off():  # packed before
            assert torch.equal(net(torch.ones(24)), as_defined(net, torch.ones(24)))


@torch.no_grad()
def test_8_bits_where_compiled_code_cannot_read():
    net, states = model(), torch.randn(5, 24)
    with packed(net, "int8"):
        torch.testing.assert_close(net(torch._neg_view(-states)), as_defined(net, states))
        torch.testing.assert_close(torch.func.vmap(net)(states), as_defined(net, states))


@torch.no_grad()
def test_8_bits_on_other_devices():
    net = model().to("meta")
    with packed(net):
        assert not is_packed(net)
    with packed(net, "int8"):
        assert [type(each.forward.product) for each in (net[0], net[2])] == 2 * [module._Defined]


@needs_packing
def test_weights_are_not_packed_one_way_within_the_other():
    net = model()
    with packed(net), pytest.raises(ValueError, match=r"packed as torch\.float32 already, and torch\.int8"):
        pack(net, "int8")
    with packed(net, "int8"):
        with packed(net, "int8"):
            pass
        with pytest.raises(ValueError, match=r"torch\.int8 already"):
            pack(net)
    assert not is_packed(net)


def test_8_bits_are_for_what_needs_no_gradients_and_for_layers_of_float32():
    net, states = model(), torch.randn(5, 24)
    wanted = net(states)
    double = nn.Linear(4, 4, dtype=torch.float64)
    with packed(net, "int8"), packed(double, "int8"):
        assert torch.equal(net(states), wanted)
        assert not is_packed(double)
        with torch.no_grad(), pytest.raises(RuntimeError):
            net(states.double())


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_other_defaults_of_torch_change_nothing(default, nothing_known, monkeypatch, tmp_path):
    compiled = cache_root() / "native"
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path))
    (tmp_path / "native").symlink_to(compiled)
    net, states = model(), torch.randn(5, 24)
    wanted = net(states).detach()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.no_grad(), packed(net):
            torch.testing.assert_close(net(states), wanted, rtol=1e-5, atol=1e-6)
    finally:
        torch.set_default_dtype(before)


def test_it_is_told_what_packs(nothing_known, monkeypatch):
    own, library = [False], [True]
    monkeypatch.setattr(module, "_own_packs", lambda dtype: own[0])
    monkeypatch.setattr(module, "_library_packs", lambda dtype: library[0])
    monkeypatch.setattr(module, "_own_gain", lambda dtype, threads: gain)
    gain = None  # it could not be kept
    assert module.chosen(torch.float32) == ("the matrix library", None)
    own[0] = True
    assert module.chosen(torch.float32) == ("code compiled here", None)
    gain = 0.5
    assert module.chosen(torch.float32) == ("the matrix library", 0.5)
    library[0] = False
    assert module.chosen(torch.float32) == ("code compiled here", None)
    own[0] = False
    assert module.chosen(torch.float32) == ("nothing", None)


def test_a_model_that_cannot_be_packed_stays_as_it_was():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(70_000, 4))
    for pack_it in (lambda: pack(net, "int8"), lambda: packed(net, "int8").__enter__()):
        with pytest.raises(ValueError, match="70000"):
            pack_it()
        assert not is_packed(net)


@needs_packing
def test_what_is_packed_stays_until_the_last_block_of_any_thread_ends():
    net, states, both = model(), torch.randn(5, 24), threading.Barrier(2, timeout=30)
    wanted, found = [], []
    with torch.no_grad(), packed(net, "int8"):
        wanted.append(net(states))

    def multiply_it(last: bool) -> None:
        with torch.no_grad(), packed(net, "int8"):
            both.wait()
            found.append(net(states))
            if last:
                other.join()
                found.append(net(states))

    other = threading.Thread(target=multiply_it, args=(False,))
    other.start()
    multiply_it(True)
    assert len(found) == 3
    assert all(torch.equal(each, wanted[0]) for each in found)
    assert not is_packed(net)


def test_a_module_that_says_so_is_not_rounded():
    class Owner(nn.Module):
        exact = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(24, 24))

    net = nn.ModuleList([Owner(), nn.Linear(24, 24)])
    with packed(net, "int8"):
        assert "forward" not in vars(net[0].inner[0])
        assert "forward" in vars(net[1])
