from __future__ import annotations

import math

import pytest
import torch

from attnbench.core import dropout as module
from attnbench.core import native
from attnbench.core.dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_rate_and_scale(p: float):
    torch.manual_seed(1)
    count = 200_003  # odd: two places share a word
    out = Dropout(p)(torch.ones(count))
    rate = (out == 0).double().mean().item()
    assert abs(rate - p) < 5 * math.sqrt(p * (1 - p) / count)
    steps = round(p * 65536)
    assert out[out != 0].unique().tolist() == pytest.approx([65536 / (65536 - steps)])


def test_neighbours_are_dropped_independently():
    torch.manual_seed(2)
    dropped = (Dropout(0.5)(torch.ones(100_000)) == 0).double() - 0.5
    for distance in (1, 2, 3, 4, 5, 8, 512, 1024):
        assert abs((dropped[distance:] * dropped[:-distance]).mean().item()) < 0.25 * 5 / math.sqrt(100_000)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_calls_are_dropped_independently(p: float):
    torch.manual_seed(7)
    calls, places = 4_000, 16
    rate = round(p * 65536) / 65536
    dropped = torch.stack([(Dropout(p)(torch.ones(places)) == 0).double() for _ in range(calls)]) - rate
    deviation = math.sqrt(rate * (1 - rate) / calls)
    assert (dropped.mean(0).abs() < 5 * deviation).all()
    for further in (1, 2):
        assert ((dropped[further:] * dropped[:-further]).mean(0).abs() < 5 * deviation**2 * math.sqrt(calls)).all()


def test_the_gradient_goes_where_the_values_went():
    torch.manual_seed(3)
    x = torch.randn(7, 11, dtype=torch.float64, requires_grad=True)
    out = Dropout(0.4)(x)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    kept = (out / x).detach()
    assert x.grad is not None
    assert torch.allclose(x.grad, upstream * kept, atol=0, rtol=1e-12)
    assert (kept == 0).any()


def test_a_seed_decides_what_is_dropped():
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return Dropout(0.3)(torch.ones(1000))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    torch.manual_seed(1)
    assert not torch.equal(Dropout(0.3)(torch.ones(1000)), Dropout(0.3)(torch.ones(1000)))


def test_eval_mode_and_rate_zero_change_nothing_and_draw_nothing():
    x = torch.randn(5)
    before = torch.get_rng_state()
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_dropped_is_zero_even_if_it_was_not_finite():
    torch.manual_seed(4)
    out = Dropout(0.5)(torch.full((1000,), math.inf))
    assert set(out.tolist()) == {0.0, math.inf}


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 3)])
def test_any_shape_and_the_type_are_kept(shape: tuple[int, ...]):
    for dtype in (torch.float32, torch.bfloat16):
        out = Dropout(0.5)(torch.ones(shape, dtype=dtype))
        assert out.shape == shape
        assert out.dtype == dtype


def test_views_are_dropped_like_copies():
    x = torch.randn(6, 4).T
    torch.manual_seed(5)
    one = Dropout(0.5)(x)
    torch.manual_seed(5)
    assert torch.equal(one, Dropout(0.5)(x.contiguous()))


def test_a_rate_next_to_one_still_has_a_scale():
    assert torch.isfinite(Dropout(0.9999999)(torch.ones(100))).all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_a_rate_outside_is_refused(p: float):
    with pytest.raises(ValueError, match="probability"):
        Dropout(p)


@pytest.mark.skipif(native.load(module._SOURCE) is None, reason="no C++ compiler: torch operations serve")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 37, 50_001])
def test_the_compiled_path_is_bit_for_bit_the_other(dtype: torch.dtype, to: torch.dtype | None, count: int):
    x = (torch.randn(3, count) * 10).to(dtype)
    x[0, 0] = math.nan
    x[1, 0], x[2, 0] = math.inf, 3e38
    other = None if to is None else torch.randn(3, count).to(to)
    upstream = torch.randn(3, count).to(dtype if to is None else torch.promote_types(dtype, to))

    def run() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(5)
        given = [each.detach().requires_grad_() for each in (x, other) if each is not None]
        out = Dropout(0.3)(*given)
        return out.detach(), *torch.autograd.grad(out, given, upstream)

    compiled = run()
    with native.off():
        plain = run()
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(native.load(module._SOURCE) is None, reason="no C++ compiler: torch operations serve")
def test_what_is_compiled_is_there_and_is_taken():
    for name, types in module._COMPILED.items():
        for dtypes in types:
            given = [torch.ones(2, dtype=dtype) for dtype in dtypes[: 1 if name == "pass" else 2]]
            assert callable(module._compiled(name, dtypes, *given))


@pytest.mark.skipif(native.load(module._SOURCE) is None, reason="no C++ compiler: torch operations serve")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_strides_change_no_digit_of_the_compiled_path(dtype: torch.dtype):
    x, to = torch.randn(257, 401).to(dtype).T, torch.randn(257, 401).to(dtype).T
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(5)
            found.append(Dropout(0.3)(x, to=to))
        torch.manual_seed(5)
        found.append(Dropout(0.3)(x.contiguous(), to=to.contiguous()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),  # which nothing is compiled for
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize("dtypes", PAIRS)
def test_what_is_kept_is_added(dtypes: tuple[torch.dtype, torch.dtype]):
    x, to = (torch.randn(3, 4_111).to(dtype).requires_grad_() for dtype in dtypes)
    torch.manual_seed(6)
    dropped = Dropout(0.3)(torch.ones(x.shape, dtype=torch.float64))
    torch.manual_seed(6)
    out = Dropout(0.3)(x, to=to)
    upstream = torch.randn(out.shape).to(out.dtype)
    slopes = torch.autograd.grad(out, (x, to), upstream)
    assert 0.2 < (dropped == 0).double().mean() < 0.4
    assert (out.dtype, *(each.dtype for each in slopes)) == (torch.promote_types(*dtypes), *dtypes)
    wanted = (to.double() + dropped * x.double()).to(out.dtype)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(slopes[0], (upstream.double() * dropped).to(x.dtype))
    assert torch.equal(slopes[1], upstream.to(to.dtype))


def test_gradients_of_gradients_are_dropped_alike():
    x = torch.randn(50, requires_grad=True)
    out = Dropout(0.5)(x, to=torch.ones(50))
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    kept = (out != 1).float() * 2
    assert torch.equal(curvature, 2 * kept * kept)


def test_without_dropout_the_sum_is_torchs():
    x, to = torch.randn(5), torch.randn(5)
    assert torch.equal(Dropout(0.5).eval()(x, to=to), to + x)
    assert torch.equal(Dropout(0.0)(x, to=to), to + x)


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_what_it_is_added_to_has_its_shape(p: float):
    with pytest.raises(ValueError, match=r"\(4,\) cannot be added to \(3, 4\)"):
        Dropout(p)(torch.ones(4), to=torch.ones(3, 4))


def test_what_lies_elsewhere_is_not_read():
    with pytest.raises(RuntimeError, match="device"):
        Dropout(0.5)(torch.ones(4), to=torch.ones(4, device="meta"))


def test_another_default_device_changes_nothing():
    torch.manual_seed(5)
    wanted = Dropout(0.5)(torch.ones(4, 8, requires_grad=True))
    torch.manual_seed(5)
    with torch.device("meta"):
        given = torch.ones(4, 8, device="cpu", requires_grad=True)
        found = Dropout(0.5)(given)
        found.sum().backward()
    assert torch.equal(found, wanted)
    assert given.grad is not None
    assert torch.equal(given.grad, wanted)
