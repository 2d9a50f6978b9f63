"""No attention: contexts of width 0, whatever comes in."""

from __future__ import annotations

import pytest
import torch

from attnbench.attention.modules.base import modules
from attnbench.attention.modules.none import NoAttentionSpec
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site
from attnbench.attention.transforms.softmax import SoftmaxSpec
from attnbench.attention.types import Dims, Positions
from attnbench.core.tree import expand_batch, select_batch

SITE = Site(ScaledDotSpec(), FullSpec(), SoftmaxSpec())


def build():
    return NoAttentionSpec().build(SITE, "cross", 8, Dims(query_width=5, key_width=4), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_contexts_are_empty_and_there_are_no_weights(dtype, need_weights):
    module = build()
    memory = module.memorize(
        torch.randn(3, 6, 4, dtype=dtype), torch.ones(3, 6, dtype=torch.bool), need_weights=need_weights
    )
    positions = Positions(torch.arange(2), torch.arange(6))
    output = module(torch.randn(3, 2, 5, dtype=dtype), memory, positions, need_weights=need_weights)
    assert output.context.shape == (3, 2, module.context_width) == (3, 2, 0)
    assert output.context.dtype == dtype
    assert output.weights is None
    assert output.history is None


def test_nothing_is_kept_of_the_source_but_its_rows():
    module = build()
    assert not list(module.parameters())
    memory = module.memorize(torch.full((3, 6, 4), torch.nan), None)
    assert memory.keys is memory.valid is memory.written is None
    assert memory.values.numel() == 0
    assert memory.values.shape[0] == 3
    assert select_batch(memory, torch.tensor([0, 2])).values.shape[0] == 2
    assert expand_batch(memory, 4).values.shape[0] == 12


def test_it_joins_a_query_without_changing_it():
    module, query = build(), torch.randn(2, 1, 5)
    memory = module.memorize(torch.randn(2, 6, 4), None)
    context = module(query, memory, Positions(torch.arange(1), torch.arange(6))).context
    assert torch.equal(torch.cat([query, context], dim=-1), query)


def test_it_has_no_stages_and_stands_at_cross():
    spec = modules.parse("none")
    assert spec.stages == frozenset()
    assert spec.roles == {"cross"}
