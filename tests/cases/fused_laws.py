"""What the Triton kernels are held to, whichever way they take: cases, and laws that other files call, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnbench.attention.backends import fused
from attnbench.attention.catalog import build_transform
from attnbench.attention.transforms.base import Fused

NEEDED = [
    pytest.mark.skipif(fused.kernels() is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        not fused.interpreted() and not torch.cuda.is_available(), reason="TRITON_INTERPRET is off and there is no GPU"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, for the divisions by 0 of rows without a key
    pytest.mark.usefixtures("on_device"),
]
"""Marks of a file whose tests run kernels."""
DEVICE = "cpu" if fused.interpreted() else "cuda"
TRANSFORMS = {
    "softmax": (Fused("softmax"), build_transform("softmax")),
    "topk": (Fused("topk", 3), build_transform("topk", k=3)),
    "topk, k = 1": (Fused("topk", 1), build_transform("topk", k=1)),
    "sparsemax": (Fused("sparsemax"), build_transform("sparsemax")),
    "entmax15": (Fused("entmax15"), build_transform("entmax15")),
    "entmax, alpha = 1.2": (Fused("entmax", excess=0.2), build_transform("entmax", alpha=1.2)),
    # nearer to 2, gradients at the edge of the support depend on the last digit of a score
    "entmax, alpha = 1.6": (Fused("entmax", excess=0.6), build_transform("entmax", alpha=1.6)),
}


def drawing(seed):
    return torch.Generator(DEVICE).manual_seed(seed)


def given(shape, dtype=torch.float32, seed=0):
    """Query, keys and values of [B, H, Q, K, E, E2]; scores reach over some units."""
    batch, heads, queries, keys, width, value_width = shape
    generator = drawing(seed)
    sizes = ((queries, width, 2.0), (keys, width, 1.0), (keys, value_width, 1.0))
    drawn = [scale * torch.randn(batch, heads, n, wide, generator=generator) for n, wide, scale in sizes]
    return [each.to(dtype).requires_grad_() for each in drawn]


def allowed(queries, keys, valid, causal):
    may = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if causal:
        may = may.tril(keys - queries)
    return may if valid is None else may & valid[:, None, None]


def defined(query, keys, values, transform, scale, valid, causal):
    found = transform(query @ keys.mT * scale, valid=allowed(query.shape[2], keys.shape[2], valid, causal))
    return found @ values


def both(name, states, *, scale=0.5, valid=None, causal=False):
    """Context and gradients of the kernels, and of the definition."""
    kernel, transform = TRANSFORMS[name]
    upstream = torch.randn(*states[0].shape[:3], states[2].shape[3], generator=drawing(9))
    made = []
    for function in (
        lambda: fused.attend(*states, kernel, scale=scale, valid=valid, causal=causal),
        lambda: defined(*states, transform, scale, valid, causal),
    ):
        context = function()
        made.append([context.detach(), *torch.autograd.grad(context, states, upstream)])
    return made


def close(found, wanted, tolerance=5e-5):
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def products_of_equal_keys_are_equal():
    query, key = torch.randn(64, 128, generator=drawing(0)), torch.randn(1, 128, generator=drawing(1))
    found = np.matmul(query.numpy(), key.expand(64, -1).numpy().T.copy())
    return bool((found == found[:, :1]).all())


class Watched:
    """A kernel, and a note of each time that it is run."""

    def __init__(self, kernel, called):
        self.kernel, self.called = kernel, called

    def __getitem__(self, grid):
        self.called.append(True)
        return self.kernel[grid]


def values_and_gradients_over_several_blocks(name, masked):
    valid = torch.ones(2, 70, dtype=torch.bool)
    valid[0, 50:], valid[1, :3], valid[1, 20:30] = False, False, False
    states = given((2, 1, 70, 70, 24, 40))
    close(*both(name, states, valid=valid if masked else None, causal=masked))


def any_shape(name, shape, causal):
    close(*both(name, given(shape), scale=shape[4] ** -0.5, causal=causal))


def rows_without_a_key_are_zero(name):
    valid = torch.tensor([[True] * 6, [False] * 6])
    found, wanted = both(name, given((2, 1, 6, 6, 4, 4)), valid=valid)
    close(found, wanted)
    for each in found:
        assert torch.equal(each[1], torch.zeros_like(each[1]))


def equal_scores_share_alike(name):
    states = given((1, 1, 5, 40, 4, 4))
    with torch.no_grad():
        for each in states[:2]:
            each.round_()  # or a processor's products of equal keys may differ in their last digit
        states[1][:] = states[1][:, :, :1]
        states[0][0, 0, 2] = 0
    close(*both(name, states))


def keys_that_tie_with_the_kth_are_all_kept(k):
    states = given((1, 2, 20, 40, 4, 4))
    with torch.no_grad():
        for each in states[:2]:
            each.round_()
    kernel, transform = Fused("topk", k), build_transform("topk", k=k)
    wanted = defined(*states, transform, 0.5, None, False)
    found = fused.attend(*states, kernel, scale=0.5)
    close([found], [wanted])


def what_is_no_number_spoils_its_row_alone_and_masked_it_spoils_none(name, strange):
    kernel, _ = TRANSFORMS[name]
    query, keys, values = (each.detach() for each in given((2, 1, 4, 9, 4, 4)))
    query[0, 0, 1, 0] = strange
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 5] = False
    alone = fused.attend(query, keys, values, kernel, scale=0.5, valid=valid)
    keys[1, 0, 5] = torch.nan
    found = fused.attend(query, keys, values, kernel, scale=0.5, valid=valid)
    assert bool(found[0, 0, 1].isnan().all())
    assert int(found.isnan().any(-1).sum()) == 1
    assert torch.equal(found[1], alone[1])


def dropout_scales_what_it_keeps_and_backward_meets_the_same_draw(name, length):
    kernel, transform = TRANSFORMS[name]
    query, keys, _ = given((2, 1, length, length, 8, 1))
    everything = torch.eye(length).expand(2, 1, length, length)
    values = torch.randn(2, 1, length, 6, generator=drawing(7)).requires_grad_()

    def run(held):
        torch.manual_seed(3)
        return fused.attend(query, keys, held, kernel, scale=0.5, causal=True, dropout=0.25)

    weights = transform(query @ keys.mT * 0.5, valid=allowed(length, length, None, True))
    with torch.no_grad():
        dropped = run(everything)  # the weights themselves
        # the last digits of a score move lighter weights of entmax-1.5 by more than a thousandth
        some = weights > (1e-4 if name == "entmax15" else 1e-6)
        kept = torch.where(some, dropped / weights, 0.0)
    assert bool((((kept - 4 / 3).abs() < 1e-3) | (kept == 0))[some].all())
    if name != "topk":
        assert float((kept[some] == 0).float().mean()) == pytest.approx(0.25, abs=0.08)
    wanted = (weights * (dropped > 0) / 0.75) @ values
    found, upstream = run(values), torch.randn(2, 1, length, 6, generator=drawing(8))
    close([found], [wanted])
    inputs = [query, keys, values]
    tolerance = 1e-4 if fused.interpreted() else 5e-4  # a GPU's exp and log are short of some digits
    close(torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream), tolerance)
    torch.manual_seed(4)
    assert not torch.equal(fused.attend(query, keys, values, kernel, scale=0.5, causal=True, dropout=0.25), found)
