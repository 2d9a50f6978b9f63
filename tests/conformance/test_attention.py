"""The laws of an attention module, for every module and transform of the registries."""

from __future__ import annotations

import pytest
import torch
from members import filled
from torch import nn

from attnbench.attention.modules.base import modules
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import ROLES, Dims, Positions
from attnbench.core.ragged import Ragged
from attnbench.core.tree import expand_batch, select_batch

BATCH, HEADS, LENGTH, WIDTH = 4, 2, 6, 8
LENGTHS = torch.tensor([6, 2, 0, 5])
EXTRA = [{"kind": "entmax", "alpha": "learned"}, {"kind": "topk", "ratio": 0.4}]


def specs(role):
    plain = [filled(transforms.get(kind), 2, role) for kind in transforms.kinds()]
    return [spec for spec in [*plain, *map(transforms.parse, EXTRA)] if role in spec.roles and not spec.needs_upper]


def cases(*roles):
    return pytest.mark.parametrize(("kind", "transform", "role"), [
        pytest.param(kind, spec, role, id=f"{role}-{kind}-{spec.kind}-{spec.digest()[:3]}")
        for role in roles for kind in modules.kinds() if role in modules.get(kind).roles for spec in specs(role)
    ])  # fmt: skip


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(kind, transform, role):
    torch.manual_seed(5)
    dims = Dims(heads=HEADS, query_width=WIDTH, key_width=WIDTH, longest_source=LENGTH)
    module = modules.parse(kind).build(Site(ScaledDotSpec(), FullSpec(), transform), role, WIDTH, dims, 0.0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module.double().eval()


def at(queries, keys=LENGTH):
    return Positions(torch.arange(queries), torch.arange(keys))


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@cases("encoder_self", "cross")
@torch.no_grad()
def test_batch_composition_and_padding_change_nothing(kind, transform, role):
    module = build(kind, transform, role)
    valid = torch.arange(LENGTH) < LENGTHS[:, None]
    keys, query = draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)
    together = module(query, module.memorize(keys, valid), at(LENGTH)).context
    for row, length in enumerate(LENGTHS.tolist()):
        shorn = keys[row : row + 1, :length], valid[row : row + 1, :length]
        alone = module(query[row : row + 1], module.memorize(*shorn), at(LENGTH, length)).context
        close(alone[0], together[row])


@cases(*ROLES)
def test_padding_can_be_left_out(kind, transform, role):
    """Values and gradients, of keys and queries that stand one behind another."""
    module = build(kind, transform, role)
    valid = torch.arange(LENGTH) < LENGTHS[:, None]
    ragged = Ragged.of(valid)
    assert ragged is not None
    mask, count = None if role == "decoder_self" else valid, int(valid.sum())
    keys, query = draw(count, WIDTH).requires_grad_(), draw(count, WIDTH, seed=1).requires_grad_()
    padded = [ragged.pad(each).squeeze(1) for each in (keys, query)]
    wanted = module(padded[1], module.memorize(padded[0], mask), at(LENGTH)).context[valid]
    found = module.answer_ragged(query, ragged, module.memorize_ragged(keys, ragged, mask), at(LENGTH))
    close(found, wanted)
    if wanted.requires_grad:
        upstream = draw(*wanted.shape, seed=2)
        given = [keys, query, *module.parameters()]
        for mine, theirs in zip(
            *(torch.autograd.grad(each, given, upstream, allow_unused=True) for each in (found, wanted)), strict=True
        ):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                close(mine, theirs)


@cases(*ROLES)
@torch.no_grad()
def test_selecting_rows_commutes_with_forward(kind, transform, role):
    module = build(kind, transform, role)
    valid = None if role == "decoder_self" else torch.arange(LENGTH) < LENGTHS[:, None]
    keys, query = draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)
    memory = module.memorize(keys, valid)
    context = module(query, memory, at(LENGTH)).context
    index = torch.tensor([3, 0, 0, 2])
    close(module(query[index], select_batch(memory, index), at(LENGTH)).context, context[index])
    doubled = module(query.repeat_interleave(2, 0), expand_batch(memory, 2), at(LENGTH)).context
    close(doubled, context.repeat_interleave(2, 0))


@cases("decoder_self")
@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (2, 3, 1), (LENGTH,)], ids=str)
@torch.no_grad()
def test_appending_to_a_cache_equals_the_full_pass(kind, transform, role, pieces):
    module = build(kind, transform, role)
    states = draw(BATCH, LENGTH, WIDTH)
    full = module(states, module.memorize(states, None), at(LENGTH)).context
    cache, start = module.allocate(BATCH, LENGTH + 2, states), 0
    for size in pieces:
        piece = states[:, start : start + size]
        cache = module.append(cache, piece)
        positions = Positions(torch.arange(start, start + size), torch.arange(start + size))
        close(module(piece, cache, positions).context, full[:, start : start + size])
        start += size


@cases("decoder_self")
@torch.no_grad()
def test_rows_of_a_cache_can_be_reordered_halfway(kind, transform, role):
    """What a beam does: row 0 goes on as two, row 2 is dropped."""
    module = build(kind, transform, role)
    states, index = draw(BATCH, LENGTH, WIDTH), torch.tensor([0, 0, 1, 3])
    mixed = torch.cat([states[index, :3], states[:, 3:]], dim=1)
    full = module(mixed, module.memorize(mixed, None), at(LENGTH)).context
    cache = module.append(module.allocate(BATCH, LENGTH, states), states[:, :3])
    cache = select_batch(cache, index)
    for step in range(3, LENGTH):
        piece = states[:, step : step + 1]
        cache = module.append(cache, piece)
        positions = Positions(torch.tensor([step]), torch.arange(step + 1))
        close(module(piece, cache, positions).context, full[:, step : step + 1])


@cases("cross")
@torch.no_grad()
def test_queries_do_not_see_one_another(kind, transform, role):
    """Beams of a source stand side by side as queries."""
    module = build(kind, transform, role)
    memory = module.memorize(draw(BATCH, LENGTH, WIDTH), torch.arange(LENGTH) < LENGTHS[:, None])
    query = draw(BATCH, 5, WIDTH, seed=1)
    context = module(query, memory, at(5)).context
    for i in range(5):
        close(module(query[:, i : i + 1], memory, Positions(torch.tensor([i]), torch.arange(LENGTH))).context[:, 0],
              context[:, i])  # fmt: skip


@cases("decoder_self")
def test_the_future_has_no_gradient(kind, transform, role):
    module = build(kind, transform, role)
    states = draw(BATCH, LENGTH, WIDTH).requires_grad_()
    context = module(states, module.memorize(states, None), at(LENGTH)).context
    for i in range(LENGTH - 1):
        (grad,) = torch.autograd.grad(context[:, i].sum(), states, retain_graph=True)
        assert not grad[:, i + 1 :].any()
        assert grad[:, : i + 1].any()


@cases(*ROLES)
@torch.no_grad()
def test_state_is_not_kept_on_the_module(kind, transform, role):
    module = build(kind, transform, role)
    valid = None if role == "decoder_self" else torch.arange(LENGTH) < LENGTHS[:, None]
    keys, query = draw(BATCH, LENGTH, WIDTH), draw(BATCH, LENGTH, WIDTH, seed=1)
    memory = module.memorize(keys, valid)
    before = set(vars(module))
    first = module(query, memory, at(LENGTH)).context
    module(draw(BATCH, LENGTH, WIDTH, seed=9), module.memorize(query, valid), at(LENGTH))
    assert torch.equal(module(query, memory, at(LENGTH)).context, first)
    assert set(vars(module)) == before
